package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestCompletion asks each shell for the words that may follow a command line.
func TestCompletion(t *testing.T) {
	for shell, ask := range map[string]string{
		"bash": `source "$0"; COMP_WORDS=($1); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _c10d; printf '%s\n' "${COMPREPLY[@]}"`,
		"fish": `source $argv[1]; complete -C $argv[2] | string replace -r '\t.*' ''; true`,
		"zsh": `compdef() { [[ "$*" == "_c10d c10d" ]] || exit 1 }
source "$0"
_files() { }
_describe() { for w in ${(P)@[-1]}; do w=${w%%:*}; [[ $w == $words[CURRENT]* ]] && print -r -- $w; done; true }
words=(${=1}) CURRENT=${#words}; _c10d`,
	} {
		t.Run(shell, func(t *testing.T) {
			program, err := exec.LookPath(shell)
			if err != nil {
				if os.Getenv("C10D_REQUIRE_SERVICES") == "1" {
					require.NoError(t, err, "C10D_REQUIRE_SERVICES is set")
				}
				t.Skip("needs ", shell, ": ", err)
			}
			var out, errs bytes.Buffer
			require.Zero(t, dispatch(stdio{nil, &out, &errs}, []string{"completion", shell}), errs.String())
			// fish also offers the files of its directory.
			dir := t.TempDir()
			script := filepath.Join(dir, "script")
			require.NoError(t, os.WriteFile(script, out.Bytes(), 0o600))
			for line, want := range map[string]string{
				"c10d s":              "store",
				"c10d help r":         "rank run",
				"c10d completion b":   "bash",
				"c10d run -no":        "-no-prefix -node-rank",
				"c10d run -n 2 -- -n": "",
				"c10d guard -":        "",
				"c10d run --nproc_":   "",
			} {
				args := []string{"-c", ask, script, line}
				if shell == "zsh" {
					args = append([]string{"-f"}, args...)
				}
				cmd := exec.Command(program, args...)
				cmd.Dir, cmd.Env = dir, append(os.Environ(), "HOME="+dir)
				got, err := cmd.CombinedOutput()
				require.NoError(t, err, "%s: %s", line, got)
				require.ElementsMatch(t, strings.Fields(want), strings.Fields(string(got)), line)
			}
		})
	}
}

// TestCompletionShell: the shell has to be one of those known.
func TestCompletionShell(t *testing.T) {
	for _, args := range [][]string{{"completion"}, {"completion", "tcsh"}, {"completion", "bash", "zsh"}} {
		var out, errs bytes.Buffer
		require.Equal(t, exitUsage, dispatch(stdio{nil, &out, &errs}, args))
		require.Contains(t, errs.String(), "want one shell, bash, zsh or fish")
	}
}
