module github.com/c10d-go/c10d/integrations/gomlx

go 1.26.5

require (
	github.com/c10d-go/c10d v0.1.0
	github.com/gomlx/compute v0.1.2
	github.com/gomlx/gomlx v0.28.2
	github.com/stretchr/testify v1.12.1
)

require (
	github.com/go-logr/logr v1.4.3 // indirect
	github.com/google/uuid v1.6.0 // indirect
	github.com/pkg/errors v0.9.1 // indirect
	go.yaml.in/yaml/v3 v3.0.5 // indirect
	golang.org/x/exp v0.0.0-20260410095643-746e56fc9e2f // indirect
	golang.org/x/sys v0.46.0 // indirect
	k8s.io/klog/v2 v2.140.0 // indirect
)

replace github.com/c10d-go/c10d => ../..
