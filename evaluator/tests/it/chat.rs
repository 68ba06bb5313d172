//! The command `evaluator chat` with thinking models.

use std::io::Write;
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
