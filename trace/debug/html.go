package debug

import (
	"bytes"
	"fmt"
	"html"
	"slices"
	"strings"
)

// markup is HTML of this package. Constants of the source become markup by themselves. Nothing else
// may: TestMarkup looks for conversions.
type markup string

// document is the HTML that is written so far.
type document struct{ text bytes.Buffer }

// put writes markup in which each %s stands for one of values. Values are escaped for text and for
// attributes in double quotes. No value may stand where a URL begins, in a style or in a script.
//
// html/template would choose the escape by the place. It also makes programs larger: see decision 41.
func (d *document) put(m markup, values ...any) {
	if len(values) == 0 {
		d.text.WriteString(string(m))
		return
	}
	for i, v := range values {
		values[i] = html.EscapeString(fmt.Sprint(v))
	}
	fmt.Fprintf(&d.text, string(m), values...)
}

// site writes where the program has called an operation.
func (d *document) site(site string) {
	if site != "" {
		d.put("<br><code>%s</code>", site)
	}
}

// head begins a page.
func (d *document) head(f *frame) {
	d.put("<!DOCTYPE html>\n" + `<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">` + "\n")
	if f.Refresh > 0 {
		d.put(`<meta http-equiv="refresh" content="%s">`, f.Refresh)
	}
	d.put("<style>")
	d.put(style)
	d.put("</style>")
}

// nav writes the links at the right of a page's header.
func (d *document) nav(f *frame, now string) {
	d.put(`<span class="soft links">%s · `, now)
	if f.Refresh > 0 {
		d.put(`<a href="?%s">stop refreshing</a>`, f.Query)
	} else {
		d.put(`<a href="?%s">refresh</a> · <a href="?%srefresh=2">every 2 s</a>`, f.Query, f.Query)
	}
	d.put(` · <a href="?%sformat=json">JSON</a></span>`, f.Query)
}

// verdict writes the verdict, and the result of a button.
func (d *document) verdict(f *frame, level, text string, why []string) {
	d.put(`<section class="verdict %s" id="verdict"><p class="text">%s</p>`+"\n", level, text)
	if len(why) > 0 {
		d.put("<ul>")
		for _, line := range why {
			d.put("<li>%s</li>", line)
		}
		d.put("</ul>")
	}
	d.put("</section>\n")
	if f.Failed != "" {
		d.put(`<section class="result" id="failed"><b>Not done:</b> %s</section>`+"\n", f.Failed)
	}
	if f.Result != "" {
		d.put(`<section class="result" id="result">%s`, f.Result)
		if f.Report != "" {
			d.put(`<pre id="report">%s</pre>`, f.Report)
		}
		d.put("</section>\n")
	}
}

// form begins a form of one button.
func (d *document) form(token string) {
	d.put(`<form method="post"><input type="hidden" name="token" value="%s">`, token)
}

// write writes the page of a rank.
func (v *rankView) write(d *document) {
	v.judge()
	d.head(&v.frame)
	d.put("<title>rank %s · c10d</title></head><body><main>\n", v.Rank)
	d.put(`<header><h1>Rank %s of %s</h1><span class="soft">%s, pid %s on %s`, v.Rank, v.Size, v.Program, v.PID, v.Host)
	if v.Job {
		d.put(` · <a href="?">all ranks</a>`)
	}
	d.put("</span>")
	d.nav(&v.frame, clockText(v.Now))
	d.put("</header>\n")
	d.verdict(&v.frame, v.Level, v.Text, v.Why)

	d.put(`<div class="buttons">` + "\n")
	d.form(v.Token)
	d.put(`<button id="dump" name="do" value="dump" title="write the recorder's last operations to a file for c10d trace">Dump the last operations</button></form>` + "\n")
	d.form(v.Token)
	d.put(`<button id="goroutines" name="do" value="goroutines" title="what every goroutine does now">Goroutines</button></form>` + "\n</div>\n")

	d.put("\n<h2>Pending operations</h2>\n" + `<div class="card" id="pending">`)
	d.pending(v.Pending)
	d.put("</div>\n")
	for i := range v.Groups {
		d.group(&v.Groups[i])
	}
	d.put("\n<h2>Last operations</h2>\n" + `<div class="card">`)
	d.recent(v.Status)
	d.put("</div>\n")
	if len(v.Log) > 0 {
		d.put("\n<h2>Log</h2>\n" + `<div class="card"><table><tbody>`)
		for _, l := range slices.Backward(v.Log) {
			d.put(`<tr><td class="soft">%s</td><td>%s</td><td>%s</td></tr>`+"\n", clockText(l.Time), l.Level, l.Text)
		}
		d.put("</tbody></table></div>\n")
	}
	d.put("</main></body></html>\n")
}

// pending writes operations that have not ended.
func (d *document) pending(all []Operation) {
	if len(all) == 0 {
		d.put(`<p class="none">None.</p>`)
		return
	}
	d.put(`<table><thead><tr><th class="n">age</th><th>operation</th><th>group</th><th class="n">number</th><th>data</th><th>route</th><th>state</th></tr></thead><tbody>` + "\n")
	for _, o := range all {
		d.put(`<tr><td class="n">%s</td><td><b>%s</b>`, ageText(o.Took), o.Op)
		d.peer(o)
		d.site(o.Site)
		if len(o.Stack) > 1 {
			d.put(`<details><summary class="soft">stack</summary><pre>%s</pre></details>`, strings.Join(o.Stack, "\n"))
		}
		d.put(`</td><td>%s</td><td class="n">%s</td><td>%s</td><td>%s</td><td>%s</td></tr>`+"\n", o.Group, o.number(), o.Size(), o.Route, o.State)
	}
	d.put("</tbody></table>")
}

// recent writes operations that have ended.
func (d *document) recent(s *Status) {
	if len(s.Recent) == 0 {
		d.put(`<p class="none">None.</p>`)
		return
	}
	d.put("<details open><summary>%s that have ended, newest first", len(s.Recent))
	if s.Dropped > 0 {
		d.put("; %s were not recorded", s.Dropped)
	}
	d.put("</summary>\n" + `<table><thead><tr><th>called</th><th class="n">took</th><th>operation</th><th>group</th><th class="n">number</th><th>data</th><th class="n">bytes/s</th><th>route</th><th>end</th></tr></thead><tbody>` + "\n")
	for _, o := range slices.Backward(s.Recent) {
		end := o.State
		if o.Error == "" {
			d.put("<tr>")
		} else {
			d.put(`<tr class="late">`)
			end = o.Error
		}
		d.put(`<td class="soft">%s</td><td class="n">%s</td><td>%s`, clockText(o.Called), ageText(o.Took), o.Op)
		d.peer(o)
		d.site(o.Site)
		d.put(`</td><td>%s</td><td class="n">%s</td><td>%s</td><td class="n">%s</td><td>%s</td><td>%s</td></tr>`+"\n", o.Group, o.number(), o.Size(), o.Rate(), o.Route, end)
	}
	d.put("</tbody></table></details>")
}

// peer writes with which rank a message is exchanged.
func (d *document) peer(o Operation) {
	if o.Peer >= 0 {
		d.put(" with rank %s", o.Peer)
	}
}

// group writes a group with its ranks and routes.
func (d *document) group(g *Group) {
	d.put("\n<h2>Group %s", g.Name)
	if g.Description != "" {
		d.put(": %s", g.Description)
	}
	d.put("</h2>\n"+`<p class="soft">This is its rank %s of %s, in epoch %s. It has called %s collectives, and %s sends and receives.`, g.Rank, len(g.Ranks), g.Epoch, g.Collectives, g.Messages)
	for _, e := range g.Explain {
		d.put(" Backend %s, %s wire: %s.", e.Backend, e.Wire, e.Why)
	}
	if g.Busy {
		d.put(" <b>The backends have not answered within a second: what is known of other ranks is old.</b>")
	}
	d.put("</p>\n" + `<div class="card"><table><thead><tr><th class="n">rank</th><th>link</th><th>state</th><th class="n">collectives</th><th class="n">answer in</th><th class="n">silent for</th><th class="n">rate</th></tr></thead><tbody>` + "\n")
	for _, l := range g.Links() {
		if l.Late {
			d.put(`<tr class="late">`)
		} else {
			d.put("<tr>")
		}
		d.put(`<td class="n">%s</td><td>%s`, l.Rank, l.Transport)
		if l.Detail != "" {
			d.put(` <span class="soft">%s</span>`, l.Detail)
		}
		d.put("</td><td>%s", l.State)
		if l.Late {
			d.put(` <span class="tag stuck">late</span>`)
		}
		d.put(`</td><td class="n">%s</td><td class="n">%s</td><td class="n">%s</td><td class="n">%s</td></tr>`+"\n", l.Calls, l.RTT, l.Quiet, l.Rate)
	}
	d.put("</tbody></table>\n")
	for _, e := range g.Explain {
		if len(e.Choices) == 0 {
			continue
		}
		d.put("<details><summary>Routes of %s</summary><table><thead><tr><th>operation</th><th>size</th><th>route</th><th>why</th></tr></thead><tbody>\n", e.Backend)
		for _, c := range e.Choices {
			d.put(`<tr><td>%s</td><td>%s</td><td>%s</td><td class="soft">%s</td></tr>`+"\n", c.Op, upToText(c.UpTo), c.Algorithm, c.Why)
		}
		d.put("</tbody></table></details>")
	}
	d.put("</div>\n")
}

// write writes the page of a job.
func (v *jobView) write(d *document) {
	plural := "s"
	if v.Size == 1 {
		plural = ""
	}
	d.head(&v.frame)
	d.put("<title>%s ranks · c10d</title></head><body><main>\n", v.Size)
	d.put(`<header><h1>%s rank%s</h1><span class="soft">job %s</span>`, v.Size, plural, v.Name)
	d.nav(&v.frame, clockText(v.Now))
	d.put("</header>\n")
	d.verdict(&v.frame, v.Level, v.Text, v.Why)

	d.put(`<div class="buttons">` + "\n")
	d.form(v.Token)
	d.put(`<button id="dump" name="do" value="dump" title="write the last operations of all ranks to files, and merge them">Dump the last operations of all ranks</button></form>` + "\n")
	for _, r := range v.Asked() {
		d.put(`<form method="post" action="?rank=%s"><input type="hidden" name="token" value="%s">`, r, v.Token)
		d.put(`<button id="goroutines%s" name="do" value="goroutines" title="what every goroutine of the late rank does now">Goroutines of rank %s</button></form>`+"\n", r, r)
	}
	d.put("</div>\n\n<h2>Ranks</h2>\n" + `<div class="card"><table id="ranks"><thead><tr><th class="n">rank</th><th class="wide">host</th><th class="n wide">pid</th><th>activity</th><th class="n">time in it</th><th class="n">collectives</th></tr></thead><tbody>` + "\n")
	for i := range v.Ranks {
		d.row(&v.Ranks[i])
	}
	d.put("</tbody></table></div>\n")
	if v.Merge == nil || len(v.Merge.Blame) == 0 {
		d.put("</main></body></html>\n")
		return
	}
	d.put("\n<h2>Who calls last</h2>\n" + `<div class="card narrow"><table><thead><tr><th class="n">rank</th><th class="n">was last</th><th class="n">of</th><th class="n">the others waited</th></tr></thead><tbody>` + "\n")
	for _, b := range v.Merge.Blame {
		d.put(`<tr><td class="n">%s</td><td class="n">%s</td><td class="n">%s</td><td class="n">%s</td></tr>`+"\n", b.Rank, b.Times, b.Of, ageText(b.Total))
	}
	d.put("</tbody></table></div>\n" + `<p class="soft">Of the collectives among the last 64 operations of each rank that all members have called.</p>` + "\n</main></body></html>\n")
}

// row writes the row of a rank in the page of a job.
func (d *document) row(x *JobRank) {
	d.put(`<tr id="rank%s"`, x.Rank)
	switch {
	case x.Late:
		d.put(` class="late"`)
	case x.Status == nil:
		d.put(` class="lost"`)
	}
	d.put(`><td class="n">`)
	if x.Late {
		d.put(`<span class="tag stuck">late</span> `)
	}
	if s := x.Status; s != nil {
		d.put(`<a href="?rank=%s">%s</a></td>`+"\n", x.Rank, x.Rank)
		d.put(`<td class="wide">%s</td><td class="n wide">%s</td><td>%s`, s.Host, s.PID, s.doing())
		if len(s.Pending) > 0 {
			d.site(s.Pending[0].Site)
		}
		d.put(`</td><td class="n">%s</td><td class="n">`, s.doingFor())
		if len(s.Groups) > 0 {
			d.put("%s", s.Groups[0].Collectives)
		}
		d.put("</td>")
	} else {
		d.put("%s</td>\n"+`<td colspan="5">`, x.Rank)
		if x.About != "" {
			d.put("%s<br>", x.About)
		}
		d.put(`<span class="soft">%s</span></td>`, x.Error)
	}
	d.put("</tr>\n")
}
