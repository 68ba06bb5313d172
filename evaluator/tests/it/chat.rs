//! The command `evaluator chat` with thinking models.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

use crate::support::scripted::Scripted;

/// Replies `12</think>34` to the first message, and `56` or `78` to the second. The reply to the second message shows
/// whether the history has the reasoning outside of the content.
const THINKING: Scripted<'_> = Scripted {
    chat_template: "{{ '</think>'[:0] }}{% if messages | length == 1 %}<think>\n\
                    {% elif messages[1].reasoning_content == '12' and messages[1].content == '34' %}!\
                    {% else %}?{% endif %}",
    added_tokens: &[],
    scripts: &["\n12</think>34", "!56", "?78"],
};

#[track_caller]
fn check(options: &[&str], want: &str) {
    let folder = tempfile::tempdir().unwrap();
    let model = THINKING.export(folder.path());
    let mut command = Command::new(env!("CARGO_BIN_EXE_evaluator"));
    command.args(["chat", "--device", "cpu", "--max-new-tokens", "20", "--model"]).arg(&model).args(options);
    command.env("RAYON_NUM_THREADS", "2").env_remove("RANK").env_remove("WORLD_SIZE");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"Hi\nHo\n/undo\n/retry\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), want, "{options:?}");
}

#[test]
fn the_history_of_a_chat_has_the_thinking_outside_of_the_content() {
    check(&[], "12\n\n34\n56\n12\n\n34\n");
}

#[test]
fn a_chat_hides_thinking_on_request() {
    check(&["--hide-thinking"], "34\n56\n34\n");
}

/// Starts a chat in a terminal, types each of `lines` at a prompt of its own, and returns the screen and the history.
/// `script` makes the terminal.
fn typed(lines: &[&str], options: &[&str]) -> Option<(String, Option<String>)> {
    // The editor turns on bracketed paste when it is ready.
    const READY: &[u8] = b"\x1b[?2004h";
    let folder = tempfile::tempdir().unwrap();
    let model = THINKING.export(folder.path());
    let program = env!("CARGO_BIN_EXE_evaluator");
    let (model, options) = (model.display(), options.join(" "));
    let chat = format!("{program} chat --device cpu --max-new-tokens 20 --hide-thinking {options} --model {model}");
    let mut command = Command::new("script");
    command.args(["--quiet", "--return", "--command", &chat, "/dev/null"]).current_dir(folder.path());
    command.env("XDG_STATE_HOME", folder.path().join("state")).env("TERM", "xterm").env("RAYON_NUM_THREADS", "2");
    command.env_remove("RANK").env_remove("WORLD_SIZE").env_remove("CANDLEWICK_NO_HISTORY");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let Ok(mut child) = command.spawn() else {
        println!("skipped: there is no program `script`");
        return None;
    };
    let (mut keys, mut stdout) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
    let mut screen = Vec::new();
    for line in lines {
        let start = screen.len();
        while !screen[start..].ends_with(READY) && stdout.read_until(b'h', &mut screen).unwrap() > 0 {}
        keys.write_all(line.as_bytes()).unwrap();
    }
    stdout.read_to_end(&mut screen).unwrap();
    let screen = String::from_utf8_lossy(&screen).into_owned();
    assert!(child.wait().unwrap().success(), "{screen}");
    let history = folder.path().join("state/candlewick/chat_history");
    if let Ok(found) = history.metadata() {
        assert_eq!(found.permissions().mode() & 0o777, 0o600);
    }
    Some((screen, std::fs::read_to_string(history).ok()))
}

#[test]
fn a_chat_in_a_terminal_edits_lines_and_keeps_a_history() {
    // Ctrl-A goes to the start of the line, Ctrl-W removes a word, the arrow finds the line before, and Tab completes.
    let lines = [
        "i\u{1}H\u{5} x\u{17}\u{8}\r",
        "\u{1b}[A\r",
        "/und\t\r",
        "\"\"\"Ho\rHo\"\"\"\r",
        "/undo\r",
        "x\u{3}",
        "/quit\r",
    ];
    let Some((screen, history)) = typed(&lines, &[]) else { return };
    for part in ["34", "removed: Hi", "removed: Ho Ho", "Tab completes a command"] {
        assert!(screen.contains(part), "no {part:?} in:\n{screen}");
    }
    assert_eq!(history.unwrap(), "#V2\nHi\n/undo\n\"\"\"Ho\\nHo\"\"\"\n/undo\n/quit\n");
}

#[test]
fn a_chat_without_history_writes_none() {
    let lines = ["Hi\r", "/reset\r", "/system Be brief.\r", "/system\r", "\u{4}"];
    let Some((screen, history)) = typed(&lines, &["--no-history"]) else { return };
    assert_eq!(history, None);
    for part in ["removed messages: 2", "system message: Be brief.", "removed the system message"] {
        assert!(screen.contains(part), "no {part:?} in:\n{screen}");
    }
}
