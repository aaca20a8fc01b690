module github.com/c10d-go/c10d/tools

go 1.25.0

require (
	github.com/c10d-go/c10d v0.1.0
	github.com/stretchr/testify v1.12.1
	golang.org/x/mod v0.39.0
)

require (
	github.com/cespare/xxhash/v2 v2.3.0 // indirect
	github.com/redis/go-redis/v9 v9.22.0 // indirect
	go.uber.org/atomic v1.11.0 // indirect
	go.yaml.in/yaml/v3 v3.0.5 // indirect
	golang.org/x/sys v0.46.0 // indirect
)

replace github.com/c10d-go/c10d => ..
