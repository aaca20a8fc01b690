module github.com/c10d-go/c10d/examples/torch/serve

go 1.25.0

require (
	github.com/c10d-go/c10d v0.1.0
	github.com/c10d-go/c10d/weights v0.1.0
	github.com/stretchr/testify v1.12.1
	go.uber.org/goleak v1.3.0
)

require (
	go.yaml.in/yaml/v3 v3.0.5 // indirect
	golang.org/x/sys v0.46.0 // indirect
)

replace (
	github.com/c10d-go/c10d => ../../..
	github.com/c10d-go/c10d/weights => ../../../weights
)
