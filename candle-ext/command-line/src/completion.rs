//! Shell completion. The script of `completions SHELL` runs the program for the candidates of each word.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::Path;

use clap::Command;
use clap_complete::Shell;
use clap_complete::env::{Bash, CompleteEnv, Elvish, EnvCompleter, Fish, Powershell, Shells, Zsh};

/// The variable that the script sets to the name of the shell.
const VARIABLE: &str = "CANDLEWICK_COMPLETE";

const SHELLS: Shells<'static> = Shells(&[&BashWithEquals, &Elvish, &Fish, &Powershell, &Zsh]);

/// Returns the shell completion script of a program. It runs the program of this name, or `program` if that is a path.
pub fn completions(command: &Command, shell: Shell, program: &Path) -> String {
    let name = command.get_name();
    let completer = match program.components().count() {
        2.. => std::path::absolute(program).unwrap_or_else(|_| program.to_owned()).to_string_lossy().into_owned(),
        _ => name.to_owned(),
    };
    let mut script = Vec::new();
    let shells = SHELLS;
    if let Some(shell) = shells.completer(&shell.to_string()) {
        // A Vec takes all writes.
        let _ = shell.write_registration(VARIABLE, name, name, &completer, &mut script);
    }
    String::from_utf8_lossy(&script).into_owned()
}

/// Prints candidates and ends the process if a completion script has started it. Nothing may be printed before.
pub fn complete(command: impl Fn() -> Command) {
    CompleteEnv::with_factory(command).var(VARIABLE).shells(SHELLS).complete();
}

/// Bash, which splits words at `=`. The words `KEY`, `=` and `VALUE` are one argument.
struct BashWithEquals;

impl EnvCompleter for BashWithEquals {
    fn name(&self) -> &'static str {
        Bash.name()
    }

    fn is(&self, name: &str) -> bool {
        Bash.is(name)
    }

    fn write_registration(
        &self,
        var: &str,
        name: &str,
        bin: &str,
        completer: &str,
        buf: &mut dyn io::Write,
    ) -> Result<(), io::Error> {
        let mut script = Vec::new();
        Bash.write_registration(var, name, bin, completer, &mut script)?;
        // After `KEY=` the word is empty, and the split word is `=`.
        let (old, new) =
            (r#"words[COMP_CWORD]="$2""#, r#"[[ "${words[COMP_CWORD]}" == "=" ]] || words[COMP_CWORD]="$2""#);
        buf.write_all(String::from_utf8_lossy(&script).replace(old, new).as_bytes())
    }

    fn write_complete(
        &self,
        command: &mut Command,
        words: Vec<OsString>,
        current_dir: Option<&Path>,
        buf: &mut dyn io::Write,
    ) -> Result<(), io::Error> {
        let variable = |name: &str| std::env::var(name).ok();
        let word_idx = variable("_CLAP_COMPLETE_INDEX").and_then(|idx| idx.parse().ok()).unwrap_or(0);
        let split_word = words.get(word_idx).cloned().unwrap_or_default();
        let (words, word_idx) = joined(words, word_idx);
        let n_kept = words.get(word_idx).map_or(0, |word| n_kept(word, &split_word));
        let candidates = clap_complete::engine::complete(command, words, word_idx, current_dir)?;
        let shown = |value: &str| value.get(n_kept..).unwrap_or_default().to_owned();
        let values: Vec<String> = candidates.iter().map(|it| shown(&it.get_value().to_string_lossy())).collect();
        buf.write_all(values.join(&variable("_CLAP_IFS").unwrap_or_else(|| "\n".into())).as_bytes())
    }
}

/// Returns the bytes of a joined word that Bash keeps: it replaces its own word, and a word `=` stays.
fn n_kept(joined: &OsStr, split_word: &OsStr) -> usize {
    match split_word == "=" {
        true => joined.len(),
        false => joined.len() - split_word.len(),
    }
}

/// Joins `KEY`, `=` and `VALUE` up to the word at `word_idx`. Returns the words and the index of that one.
fn joined(words: Vec<OsString>, word_idx: usize) -> (Vec<OsString>, usize) {
    let mut joined: Vec<OsString> = Vec::new();
    let mut is_open = false;
    for (idx, word) in words.into_iter().enumerate().take(word_idx + 1) {
        let is_equals = word == "=" && idx > 0;
        match joined.last_mut() {
            Some(last) if is_equals || is_open => last.push(&word),
            _ => joined.push(word),
        }
        is_open = is_equals;
    }
    let last = joined.len().saturating_sub(1);
    (joined, last)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn bash_words_around_an_equals_sign_are_one_argument() {
        let check = |words: &[&str], word_idx: usize, want: &[&str]| {
            let (joined, last) = joined(words.iter().map(OsString::from).collect(), word_idx);
            assert_eq!((joined, last), (want.iter().map(OsString::from).collect(), want.len() - 1), "{words:?}");
        };
        check(&["p", "k", "=", "v"], 3, &["p", "k=v"]);
        check(&["p", "k", "="], 2, &["p", "k="]);
        check(&["p", "k", "=", "v", ""], 4, &["p", "k=v", ""]);
        check(&["p", "k", "=", "v", "w"], 1, &["p", "k"]);
    }

    #[test]
    fn bash_replaces_the_word_that_it_has_split() {
        for (joined, split_word, want) in
            [("k=v", "v", 2), ("k=", "=", 2), ("k=", "", 2), ("k=v", "k=v", 0), ("k", "k", 0)]
        {
            assert_eq!(n_kept(joined.as_ref(), split_word.as_ref()), want, "{joined}");
        }
    }

    #[test]
    fn every_shell_has_a_script_that_runs_the_program() {
        for shell in [Shell::Bash, Shell::Elvish, Shell::Fish, Shell::PowerShell, Shell::Zsh] {
            for (program, want) in [("demo", "demo"), ("/opt/demo", "/opt/demo")] {
                let script = completions(&Command::new("demo"), shell, Path::new(program));
                assert!(script.contains(VARIABLE) && script.contains(want), "{shell}:\n{script}");
            }
        }
        assert!(completions(&Command::new("demo"), Shell::Bash, Path::new("demo")).contains(r#"== "=" ]]"#));
    }
}
