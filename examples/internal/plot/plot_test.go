package plot

import (
	"bytes"
	"encoding/xml"
	"errors"
	"image/png"
	"io"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func sample() *Chart {
	c := &Chart{Title: "digits, 4 ranks <&> tcp store", XLabel: "epoch"}
	var steps, loss, epochs, mean, accuracy []float64
	for i := range 300 {
		steps = append(steps, float64(i)/20)
		loss = append(loss, 2.3*math.Exp(-float64(i)/60)*(1+.4*math.Sin(float64(i*i)))+.01)
		if i%20 == 19 {
			epochs = append(epochs, float64(i+1)/20)
			mean = append(mean, 2.3*math.Exp(-float64(i-10)/60)+.01)
			accuracy = append(accuracy, .98-.8*math.Exp(-float64(i)/40))
		}
	}
	c.Panels = []Panel{
		{Title: "training loss", Log: true, Curves: []Curve{{"each step", Faint, steps, loss}, {"mean of an epoch", Strong, epochs, mean}}},
		{Title: "held-out accuracy", Percent: true, Curves: []Curve{{"4 ranks", Strong, epochs, accuracy}, {"1 process", Dashed, epochs, accuracy}}},
	}
	return c
}

func TestSVG(t *testing.T) {
	b, err := sample().Render(".svg")
	require.NoError(t, err)
	d, texts, lines := xml.NewDecoder(bytes.NewReader(b)), 0, 0
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		if s, ok := token.(xml.StartElement); ok {
			switch s.Name.Local {
			case "text":
				texts++
			case "polyline":
				lines++
			}
		}
	}
	require.Greater(t, texts, 15)
	require.Greater(t, lines, 20)
	require.Contains(t, string(b), "digits, 4 ranks &lt;&amp;&gt; tcp store")
	require.NotContains(t, string(b), "NaN")
}

func TestPNG(t *testing.T) {
	c := sample()
	b, err := c.Render(".PNG")
	require.NoError(t, err)
	img, err := png.Decode(bytes.NewReader(b))
	require.NoError(t, err)
	require.Equal(t, width*density, img.Bounds().Dx())
	require.Equal(t, c.height()*density, img.Bounds().Dy())
	seen := make(map[uint32]int)
	for y := range img.Bounds().Dy() {
		for x := range img.Bounds().Dx() {
			r, g, b, _ := img.At(x, y).RGBA()
			seen[r>>8<<16|g>>8<<8|b>>8]++
		}
	}
	for name, s := range map[string]stroke{"strong": styles[Strong], "faint": styles[Faint], "dashed": styles[Dashed]} {
		require.Greater(t, seen[uint32(s.color.R)<<16|uint32(s.color.G)<<8|uint32(s.color.B)], 100, name)
	}
}

// TestOddCharts draws what a run can leave: nothing, one point, a run that diverged.
func TestOddCharts(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	for name, c := range map[string]*Chart{
		"nothing":   {},
		"no points": {Panels: []Panel{{Log: true, Curves: []Curve{{}}}}},
		"one point": {Panels: []Panel{{Curves: []Curve{{X: []float64{1}, Y: []float64{2}}, {Style: Dashed, X: []float64{1}, Y: []float64{2}}}}}},
		"diverged":  {Panels: []Panel{{Log: true, Curves: []Curve{{X: []float64{1, 2, 3, 4}, Y: []float64{0, nan, inf, -1}}}}}},
		"runes":     {Title: "größe 数 \x00 \xff"},
	} {
		for _, ext := range []string{".svg", ".png"} {
			b, err := c.Render(ext)
			require.NoError(t, err, name)
			require.NotContains(t, string(b), "NaN", name)
		}
	}
}

func TestWriteFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "loss.svg")
	require.NoError(t, CheckName(path))
	require.NoError(t, sample().WriteFile(path))
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	require.True(t, bytes.HasPrefix(b, []byte("<svg")))
	require.ErrorContains(t, CheckName("loss.pdf"), `.svg or .png, not in ".pdf"`)
	require.Error(t, sample().WriteFile("loss.pdf"))
	require.Error(t, sample().WriteFile(filepath.Join(path, "below.svg")))
}

func TestTicks(t *testing.T) {
	require.InDeltaSlice(t, []float64{0, 2, 4, 6, 8, 10, 12, 14}, ticks(span{0, 15}, 10), 1e-12)
	require.InDeltaSlice(t, []float64{.92, .94, .96, .98}, ticks(span{.911, .987}, 5), 1e-12)
	log := Panel{Log: true}
	var labels []string
	for _, k := range log.ticks(span{-1.2, .4}) {
		labels = append(labels, k.label)
	}
	require.Equal(t, []string{"0.1", "0.2", "0.5", "1", "2"}, labels)
}
