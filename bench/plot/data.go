package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
)

// record is the part of a line of "c10d bench -json" that is drawn.
type record struct {
	System  string  `json:"system"`
	Op      string  `json:"op"`
	DType   string  `json:"dtype"`
	Device  string  `json:"device"`
	Work    string  `json:"work"`
	World   int     `json:"world"`
	Bytes   int     `json:"bytes"`
	P50     float64 `json:"time_us_p50"`
	BusBW   float64 `json:"busbw_GBps"`
	InPlace bool    `json:"in_place"`
	Alloc   bool    `json:"alloc"`
}

// training is a line of examples/ddp -curves.
type training struct {
	Training string    `json:"training"` // who trained
	Title    string    `json:"title"`    // on what
	PerEpoch int       `json:"steps_per_epoch"`
	Steps    []float64 `json:"steps"` // loss of each step
	Loss     []float64 `json:"loss"`  // of each epoch
	Accuracy []float64 `json:"accuracy"`
}

// curveName returns the system, its work and the kind of its tensors. Records of one
// operation with the same name are one curve.
func (r *record) curveName() string {
	name := r.System
	if r.Work != "" {
		name += " " + r.Work
	}
	if r.Alloc {
		name += " alloc"
	}
	if r.InPlace {
		name += " in place"
	}
	return name
}

func (r *record) title() string {
	on := ""
	if r.Device != "" {
		on = " on " + r.Device
	}
	return fmt.Sprintf("%s of %s%s, %d ranks", r.Op, r.DType, on, r.World)
}

// sameOp are other systems' names of operations.
var sameOp = map[string]string{
	"allreduce": "all_reduce", "allgather": "all_gather_into_tensor", "alltoall": "all_to_all_single", "sendrecv": "send_recv",
}

// data is what the files have.
type data struct {
	records   []record // the fastest of each case
	trainings []training
}

// only chooses records. Its zero value chooses all.
type only struct {
	op    string
	ranks int
}

func (o only) fits(r record) bool {
	return (o.op == "" || o.op == r.Op) && (o.ranks == 0 || o.ranks == r.World)
}

// load reads files of JSON objects. A record without a time or a size has no place in
// a plot and is left out.
func load(files []string, only only) (*data, error) {
	d := new(data)
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		for dec := json.NewDecoder(f); err == nil; {
			var line struct {
				record
				training
			}
			if err = dec.Decode(&line); err != nil {
				break
			}
			switch r := line.record; {
			case line.Training != "":
				d.trainings = append(d.trainings, line.training)
			case r.System == "" || r.Op == "":
				err = fmt.Errorf("a line is neither a record of c10d bench nor a training")
			case r.P50 > 0 && r.Bytes > 0:
				r.Op = cmp.Or(sameOp[r.Op], r.Op)
				if only.fits(r) {
					d.keep(r)
				}
			}
		}
		f.Close()
		if err != io.EOF {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	return d, nil
}

// keep adds r, or puts it in place of a slower one of the same case.
func (d *data) keep(r record) {
	i := slices.IndexFunc(d.records, func(o record) bool {
		return o.title() == r.title() && o.curveName() == r.curveName() && o.Bytes == r.Bytes
	})
	switch {
	case i < 0:
		d.records = append(d.records, r)
	case r.P50 < d.records[i].P50:
		d.records[i] = r
	}
}

// rows returns one row for each operation and each training. Systems keep their colours.
func (d *data) rows(against string) ([]row, error) {
	var rows []row
	var titles, names []string
	for _, r := range d.records {
		indexOf(&titles, r.title())
		indexOf(&names, r.curveName())
	}
	if against != "" && !slices.Contains(names, against) {
		return nil, fmt.Errorf("-against %s: there are records of %q", against, names)
	}
	for _, title := range titles {
		time := panel{title: title + ": p50, lower is better", xLabel: "bytes", xLog: byteAxis, legend: corner{true, true}, yLog: timeAxis}
		right := panel{title: "bus bandwidth, higher is better", xLabel: "bytes", xLog: byteAxis, legend: corner{true, true}, yLog: bandwidthAxis}
		if against != "" {
			right.title, right.yLog = "p50 over that of "+against+": above 1x is slower", ratioAxis
			right.legend.left = false
		}
		base := map[int]float64{}
		for _, r := range d.of(title, against) {
			base[r.Bytes] = r.P50
		}
		for i, name := range names {
			t := curve{name: name, color: i}
			b := t
			for _, r := range d.of(title, name) {
				t.x, t.y = append(t.x, float64(r.Bytes)), append(t.y, r.P50)
				if against == "" {
					b.x, b.y = append(b.x, float64(r.Bytes)), append(b.y, r.BusBW)
				} else if base[r.Bytes] > 0 {
					b.x, b.y = append(b.x, float64(r.Bytes)), append(b.y, r.P50/base[r.Bytes])
				}
			}
			time.curves, right.curves = append(time.curves, t), append(right.curves, b)
		}
		rows = append(rows, row{time, right})
	}
	return append(rows, d.trainingRows()...), nil
}

// of returns the records of one curve, by their sizes.
func (d *data) of(title, name string) []record {
	var of []record
	for _, r := range d.records {
		if r.title() == title && r.curveName() == name {
			of = append(of, r)
		}
	}
	slices.SortFunc(of, func(a, b record) int { return a.Bytes - b.Bytes })
	return of
}

// trainingRows draws trainings of one title into one row.
func (d *data) trainingRows() []row {
	var rows []row
	var titles []string
	for _, t := range d.trainings {
		i := indexOf(&titles, t.Title)
		if i == len(rows) {
			rows = append(rows, row{
				{title: t.Title + ": loss", xLabel: "epoch", yLog: lossAxis, legend: corner{top: true}, curves: []curve{
					{name: t.Training + ", each step", faint: true, x: places(len(t.Steps), t.PerEpoch), y: t.Steps},
				}},
				{title: "accuracy on held-out images", xLabel: "epoch", percent: true},
			})
		}
		loss, accuracy := &rows[i][0], &rows[i][1]
		c := curve{name: t.Training, color: len(accuracy.curves), dashed: len(accuracy.curves) > 0, x: places(len(t.Loss), 1), y: t.Loss}
		loss.curves = append(loss.curves, c)
		c.x, c.y = places(len(t.Accuracy), 1), t.Accuracy
		accuracy.curves = append(accuracy.curves, c)
	}
	return rows
}

// places are the ends of n steps, in epochs of perEpoch steps.
func places(n, perEpoch int) []float64 {
	x := make([]float64, n)
	for i := range x {
		x[i] = float64(i+1) / float64(max(perEpoch, 1))
	}
	return x
}
