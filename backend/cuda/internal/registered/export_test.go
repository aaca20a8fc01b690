package registered

const RestCalls = restCalls
