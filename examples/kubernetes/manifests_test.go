package kubernetes

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	jobset "sigs.k8s.io/jobset/api/jobset/v1alpha2"
	"sigs.k8s.io/yaml"

	"github.com/c10d-go/c10d/internal/launch"
	"github.com/c10d-go/c10d/internal/must"
)

// decode decodes a manifest's documents in order. A field that the type does not have is an error.
func decode(t *testing.T, file string, into ...any) {
	t.Helper()
	text := must.Get(os.ReadFile(file))
	documents := bytes.Split(text, []byte("\n---\n"))
	require.Len(t, documents, len(into))
	for i, d := range documents {
		require.NoError(t, yaml.UnmarshalStrict(d, into[i]), "%s, document %d", file, i)
	}
}

// pod is what a controller makes of a pod template.
type pod struct {
	spec   corev1.PodSpec
	index  int // in its Job
	labels map[string]string
}

// detect reads the environment that the kubelet gives the pod's container.
func (p pod) detect(t *testing.T) launch.Env {
	t.Helper()
	require.Len(t, p.spec.Containers, 1)
	env := map[string]string{
		"JOB_COMPLETION_INDEX": strconv.Itoa(p.index), "KUBERNETES_SERVICE_HOST": "10.0.0.1",
	}
	for _, v := range p.spec.Containers[0].Env {
		env[v.Name] = v.Value
		if v.ValueFrom == nil {
			continue
		}
		require.NotNil(t, v.ValueFrom.FieldRef, v.Name)
		found := false
		for label, value := range p.labels {
			if v.ValueFrom.FieldRef.FieldPath == "metadata.labels['"+label+"']" {
				env[v.Name], found = value, true
			}
		}
		require.True(t, found, "%s: pods have no label for %s", v.Name, v.ValueFrom.FieldRef.FieldPath)
	}
	e := must.Get(launch.Detect(func(name string) string { return env[name] }))
	return e
}

// indexed checks a Job whose pods are ranks and returns their number.
func indexed(t *testing.T, j batchv1.JobSpec) int {
	t.Helper()
	require.Equal(t, batchv1.IndexedCompletion, *j.CompletionMode)
	require.Equal(t, *j.Completions, *j.Parallelism, "all ranks run at a time")
	require.Equal(t, corev1.RestartPolicyNever, j.Template.Spec.RestartPolicy)
	return int(*j.Completions)
}

func TestIndexedJob(t *testing.T) {
	var service corev1.Service
	var job batchv1.Job
	decode(t, "indexed-job.yaml", &service, &job)
	require.Equal(t, "v1 Service", service.APIVersion+" "+service.Kind)
	require.Equal(t, "batch/v1 Job", job.APIVersion+" "+job.Kind)

	labels := map[string]string{batchv1.JobNameLabel: job.Name, batchv1.ControllerUidLabel: "a-uid"}
	require.Equal(t, corev1.ClusterIPNone, service.Spec.ClusterIP)
	for name, value := range service.Spec.Selector {
		require.Equal(t, labels[name], value, "the service selects the Job's pods")
	}
	require.Equal(t, service.Name, job.Spec.Template.Spec.Subdomain)
	size := indexed(t, job.Spec)
	for rank := range size {
		e := pod{job.Spec.Template.Spec, rank, labels}.detect(t)
		require.Equal(t, fmt.Sprintf("rank %d of %d from Kubernetes Indexed Job, local rank 0 of 1, node %d of %d, rank 0's store at %s-0.%s:29500",
			rank, size, rank, size, job.Name, service.Name), e.String())
		require.Equal(t, "a-uid", e.RunID)
	}
}

func TestJobSet(t *testing.T) {
	var set jobset.JobSet
	decode(t, "jobset.yaml", &set)
	require.Equal(t, jobset.GroupVersion.String()+" JobSet", set.APIVersion+" "+set.Kind)
	require.Len(t, set.Spec.ReplicatedJobs, 1)
	jobs := set.Spec.ReplicatedJobs[0]
	pods := indexed(t, jobs.Template.Spec)
	size := pods * int(jobs.Replicas)
	for rank := range size {
		e := pod{jobs.Template.Spec.Template.Spec, rank % pods, map[string]string{
			jobset.JobSetNameKey: set.Name, jobset.ReplicatedJobNameKey: jobs.Name, jobset.ReplicatedJobReplicas: strconv.Itoa(int(jobs.Replicas)),
			jobset.JobIndexKey: strconv.Itoa(rank / pods), "jobset.sigs.k8s.io/restart-attempt": "2", "jobset.sigs.k8s.io/jobset-uid": "a-uid",
		}}.detect(t)
		require.Equal(t, fmt.Sprintf("rank %d of %d from JobSet, local rank 0 of 1, node %d of %d, rank 0's store at %s-%s-0-0.%s:29500, restart 2",
			rank, size, rank, size, set.Name, jobs.Name, set.Name), e.String())
		require.Equal(t, "a-uid", e.RunID)
	}
}
