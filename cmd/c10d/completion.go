package main

import (
	"flag"
	"fmt"
	"io"
	"strings"
)

func init() {
	register(command{
		name: "completion", args: "bash|zsh|fish", summary: "print a script that completes commands and flags in a shell",
		setup: func(*flag.FlagSet) func(stdio, []string) (int, error) {
			return func(std stdio, args []string) (int, error) {
				if len(args) != 1 || shells[args[0]] == nil {
					return 0, usagef("want one shell, bash, zsh or fish, not %q", args)
				}
				_, err := io.WriteString(std.out, shells[args[0]]())
				return 0, err
			}
		},
	})
}

// shells are the shells for which there is a script.
var shells map[string]func() string

func init() { shells = map[string]func() string{"bash": bash, "zsh": zsh, "fish": fish} }

// word is what a shell can put at the cursor.
type word struct {
	text, about string
	value       bool // a flag with a value
}

// following returns the words that may follow a command: its flags, or its arguments if it has
// none but these.
func following(name string) (words []word) {
	switch name {
	case "help":
		return commandWords()
	case "completion":
		return []word{{text: "bash"}, {text: "fish"}, {text: "zsh"}}
	}
	flags := flag.NewFlagSet(name, flag.ContinueOnError)
	commands[name].setup(flags)
	visible(flags).VisitAll(func(f *flag.Flag) {
		kind, about := flag.UnquoteUsage(f)
		if i := strings.IndexAny(about, ";:("); i > 0 {
			about = strings.TrimSpace(about[:i])
		}
		words = append(words, word{"-" + f.Name, about, kind != ""})
	})
	return words
}

func commandWords() (words []word) {
	for _, name := range commandNames() {
		words = append(words, word{text: name, about: summaryOf(name)})
	}
	return words
}

func bash() string {
	list := func(words []word) string {
		var texts []string
		for _, w := range words {
			texts = append(texts, w.text)
		}
		return strings.Join(texts, " ")
	}
	var b strings.Builder
	fmt.Fprintf(&b, `# source <(c10d completion bash)
_c10d() {
	local cur=${COMP_WORDS[COMP_CWORD]} words=
	[[ " ${COMP_WORDS[*]:1:COMP_CWORD-1} " == *" -- "* ]] && return
	if ((COMP_CWORD == 1)); then
		words="%s"
	else
		case ${COMP_WORDS[1]} in
`, list(commandWords()))
	for _, name := range commandNames() {
		fmt.Fprintf(&b, "\t\t%s) words=%q ;;\n", name, list(following(name)))
	}
	b.WriteString(`		esac
		[[ $words == -* && $cur != -* ]] && words=
	fi
	COMPREPLY=($(compgen -W "$words" -- "$cur"))
}
complete -o default -F _c10d c10d
`)
	return b.String()
}

func zsh() string {
	list := func(words []word) string {
		var texts []string
		for _, w := range words {
			texts = append(texts, "'"+strings.ReplaceAll(w.text+":"+w.about, "'", `'\''`)+"'")
		}
		return strings.Join(texts, " ")
	}
	var b strings.Builder
	fmt.Fprintf(&b, `# source <(c10d completion zsh)
_c10d() {
	local -a list
	if ((CURRENT == 2)); then
		list=(%s)
		_describe command list
		return
	fi
	case $words[2] in
`, list(commandWords()))
	for _, name := range commandNames() {
		fmt.Fprintf(&b, "\t%s) list=(%s) ;;\n", name, list(following(name)))
	}
	b.WriteString(`	esac
	if [[ $list[1] == -* && ($words[CURRENT] != -* || ${words[(I)--]} -ne 0) ]]; then
		_files
	else
		_describe -o word list
	fi
}
compdef _c10d c10d
`)
	return b.String()
}

func fish() string {
	escape := strings.NewReplacer(`\`, `\\`, `'`, `\'`)
	about := func(w word) string { return "'" + escape.Replace(w.about) + "'" }
	var b strings.Builder
	b.WriteString("# c10d completion fish | source\n")
	for _, c := range commandWords() {
		fmt.Fprintf(&b, "complete -c c10d -n __fish_use_subcommand -f -a %s -d %s\n", c.text, about(c))
		for _, w := range following(c.text) {
			what := "-f -a " + w.text
			if name, isFlag := strings.CutPrefix(w.text, "-"); isFlag {
				what = "-o " + name
				if w.value {
					what += " -r"
				}
			}
			fmt.Fprintf(&b, "complete -c c10d -n '__fish_seen_subcommand_from %s; and not contains -- -- (commandline -opc)' %s -d %s\n", c.text, what, about(w))
		}
	}
	return b.String()
}
