package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/ddp"
	"github.com/c10d-go/c10d/examples/internal/dataset"
	"github.com/c10d-go/c10d/examples/internal/mlp"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/tensor"
)

// runRank joins the group, trains, and on rank 0 reports.
func runRank(ctx context.Context, c *config, stdout, stderr io.Writer) (err error) {
	start := time.Now()
	data, err := dataset.Digits()
	if err != nil {
		return err
	}
	devices, err := openDriver(c)
	if err != nil {
		return err
	}
	g, err := pg.Init(ctx, c.init, pg.InitOptions{Options: groupOptions(c, devices)})
	if err != nil {
		return err
	}
	r := &rank{config: c, group: g}
	defer func() { err = r.end(ctx, devices, err) }()

	if r.trainer, err = newTrainer(c, data, g.Rank(), g.Size()); err != nil {
		return err
	}
	gpu := ""
	if devices != nil {
		e, err := newDevice(devices, r.trainer, r.most(c))
		if err != nil {
			return fmt.Errorf("ddp: -device %s: %w", c.device, err)
		}
		r.engine, gpu = e, e.name
	}
	from, err := r.resume(ctx)
	if err != nil {
		return err
	}
	if err := r.engine.push(ctx); err != nil {
		return err
	}
	params, o, err := r.engine.params()
	if err != nil {
		return err
	}
	o.BucketCap, o.FirstBucket = c.bucketKiB<<10, c.bucketKiB<<10
	var power *ddp.PowerSGD
	if c.powerRank > 0 {
		// Compression begins at once, because this training has few steps.
		if power, err = ddp.NewPowerSGD(ddp.PowerSGDOptions{Rank: c.powerRank, Start: 2, Seed: c.seed}); err != nil {
			return err
		}
		o.Hook = power.Hook
	}
	// From here on every rank has rank 0's parameters, and gradients that are
	// announced with Ready are averaged over the ranks by Finish.
	d, err := ddp.New(ctx, g, params, o)
	if err != nil {
		return err
	}
	r.reducer = d
	r.engine.reduced(d)

	training := time.Now()
	if err := r.train(ctx, from, &progress{stderr, c.epochs, from, data.Train.Len(), training}); err != nil {
		return err
	}
	if err := r.engine.pull(ctx); err != nil {
		return err
	}
	trained := time.Since(training)

	sum := digest(r.model.Params())
	identical, err := r.sameEverywhere(ctx, sum)
	if err != nil {
		return err
	}
	// After Close no other rank may need this one.
	if err := g.Barrier(ctx); err != nil {
		return err
	}
	if g.Rank() != 0 {
		return nil
	}
	rep := r.report(identical, sum)
	rep.Buckets, rep.GPU = len(d.Buckets()), gpu
	if power != nil {
		before, after := power.Compression()
		rep.Compression = round(float64(before)/float64(after), 3)
	}
	if devices != nil {
		rep.Work = allReduceWork(g)
	}
	rep.Seconds = round(time.Since(start).Seconds(), 3)
	rep.ImagesPerSecond = math.Round(float64(c.epochs-from) * float64(data.Train.Len()) / trained.Seconds())
	if c.compare {
		if err := r.compare(ctx, rep); err != nil {
			return err
		}
	}
	return r.publish(stdout, rep)
}

// end leaves the group and closes the devices. After a failure it leaves them open, because
// operations may still run on them.
func (r *rank) end(ctx context.Context, devices driver.Driver, err error) error {
	if err == nil {
		err = r.engine.close(ctx)
	}
	err = errors.Join(err, r.group.Close())
	if err == nil && r.config.device == onSim {
		err = devices.Close() // its error has the findings of the simulator
	}
	return err
}

// rank is one member of the training.
type rank struct {
	*trainer
	config  *config
	group   *pg.ProcessGroup
	history history // of the whole training; on rank 0
}

// train runs the epochs from the given one on.
func (r *rank) train(ctx context.Context, from int, progress *progress) error {
	for epoch := from; epoch < r.config.epochs; epoch++ {
		losses, err := r.epoch(ctx, epoch)
		if err != nil {
			return err
		}
		loss, correct, err := r.evaluate(ctx)
		if err != nil {
			return err
		}

		// One all-reduce an epoch sums the results of all ranks.
		sums := append(losses, loss, float64(correct))
		if err := pg.Wait(r.group.AllReduce(ctx, pg.Slice(sums), pg.Sum())); err != nil {
			return err
		}
		if r.rank != 0 {
			continue
		}
		n := len(losses)
		r.history.record(r.trainer, sums[:n], sums[n], sums[n+1])
		progress.epoch(&r.history)
		if err := r.save(ctx, epoch+1); err != nil {
			return err
		}
	}
	return nil
}

// tensors returns the parameters for DDP: tensors over the model's own slices.
func tensors(params []*mlp.Param) ([]ddp.Param, error) {
	var out []ddp.Param
	for _, p := range params {
		value, err := tensor.Of(p.Value, p.Shape...)
		if err != nil {
			return nil, err
		}
		grad, err := tensor.Of(p.Grad, p.Shape...)
		if err != nil {
			return nil, err
		}
		out = append(out, ddp.Param{Name: p.Name, Value: value, Grad: grad})
	}
	return out, nil
}

// digest is the SHA-256 of the bits of all parameters.
func digest(params []*mlp.Param) [sha256.Size]byte {
	h := sha256.New()
	var b []byte
	for _, p := range params {
		b = b[:0]
		for _, v := range p.Value {
			b = binary.LittleEndian.AppendUint32(b, math.Float32bits(v))
		}
		h.Write(b)
	}
	return [sha256.Size]byte(h.Sum(nil))
}

// sameEverywhere reports whether all ranks have the same digest.
func (r *rank) sameEverywhere(ctx context.Context, sum [sha256.Size]byte) (bool, error) {
	all := make([]byte, r.size*len(sum))
	err := pg.Wait(r.group.AllGatherIntoTensor(ctx, pg.Slice(all), pg.Slice(sum[:])))
	return bytes.Equal(all, bytes.Repeat(sum[:], r.size)), err
}

// compare trains again in this process alone, and writes the difference of the parameters
// into the report.
func (r *rank) compare(ctx context.Context, rep *report) error {
	start := time.Now()
	single, h, err := trainAlone(ctx, r.config, r.data)
	if err != nil {
		return fmt.Errorf("ddp: the single process to compare with: %w", err)
	}
	rep.Compare = difference(single.model.Params(), r.model.Params())
	rep.Compare.Accuracy = round(h.Accuracy[len(h.Accuracy)-1], 6)
	rep.Compare.Loss = round(h.Train[len(h.Train)-1], 6)
	rep.Compare.Seconds = round(time.Since(start).Seconds(), 3)
	return nil
}

// difference compares the parameters of two trainings.
func difference(want, got []*mlp.Param) *comparison {
	c := new(comparison)
	var sum, norm float64
	for k, p := range want {
		for i, v := range p.Value {
			d := math.Abs(float64(v) - float64(got[k].Value[i]))
			c.MaxAbs = max(c.MaxAbs, d)
			sum += d * d
			norm += float64(v) * float64(v)
		}
	}
	if sum > 0 {
		c.Relative = math.Sqrt(sum / norm)
	}
	return c
}

// storeName is the kind of store for the report.
func storeName(init string) string {
	scheme, _, _ := strings.Cut(init, "://")
	switch scheme {
	case "", "env":
		return "tcp"
	case "rediss":
		return "redis"
	}
	return scheme
}
