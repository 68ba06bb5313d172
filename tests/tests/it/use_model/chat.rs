//! `trainer chat`: its turns, commands and context.

use serde_json::json;

use super::{TrainedRuns, ok, text};

#[test]
fn a_chat_remembers_until_it_is_reset() {
    let runs = TrainedRuns::shared();
    let options = ["--max-new-tokens", "20"];
    let generate = |arguments: &[&str], stdin: &str| {
        runs.says(&[&["generate", "--model", "full"], arguments, &options[..]].concat(), stdin)
    };
    let first = generate(&["--system", "Be brief.", "--prompt", "What comes after 3?"], "");
    let messages = json!([
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What comes after 3?"},
        {"role": "assistant", "content": first.strip_suffix('\n').unwrap()}, {"role": "user", "content": "And then?"},
    ]);
    let second = generate(&["--messages", "-"], &messages.to_string());
    let lines = "What comes after 3?\nAnd then?\n/reset\n\n/system Be brief.\nWhat comes after 3?\n/quit\nnever\n";
    let arguments = ["--system", "Be brief.", "--device", "cpu"];
    for (program, model) in [("evaluator", &["chat", "--model", "full"][..]), ("trainer", &["chat", "full"])] {
        let output = ok(runs.run(program, &[model, &arguments, &options].concat(), lines));
        assert_eq!(text(&output.stdout), format!("{first}{second}{first}"), "{program}");
    }
}

/// Every command leads to the conversation that another way of typing it has.
#[test]
fn a_chat_edits_its_last_turn() {
    let runs = TrainedRuns::shared();
    let chat = |options: &[&str], lines: &str| {
        let output = ok(runs.run("trainer", &[&["chat", "full", "--device", "cpu"], options].concat(), lines));
        (text(&output.stdout), text(&output.stderr))
    };
    // The penalty makes answers depend on the history.
    let options = ["--max-new-tokens", "20", "--repetition-penalty", "1.5"];
    let says = |lines: &str| chat(&options, lines).0;
    let (first, both) = (says("Hi\n"), says("Hi\nWhat comes after 3?\n"));
    let second = both.strip_prefix(&first).unwrap();
    assert_ne!(second, says("What comes after 3?\n"), "the test sees the history");
    assert_eq!(says("Hi\nHo\n/undo\nWhat comes after 3?\n"), says("Hi\nHo\n/edit What comes after 3?\n"));
    assert!(says("Hi\nHo\n/edit What comes after 3?\n").ends_with(second));
    assert_eq!(says("Hi\n/retry\nWhat comes after 3?\n"), format!("{first}{both}"));
    assert_eq!(says("Hi\n/undo\nHi\n"), format!("{first}{first}"));
    let (said, notes) = chat(&options, "/undo\n/retry\n/edit\n/edit Hi\n");
    assert_eq!((said.as_str(), notes.matches("note: the conversation has no message yet").count()), ("", 3));
    assert!(notes.contains("note: /edit needs the new text"), "{notes}");
    let sampled = [&options[..], &["--temperature", "3"]].concat();
    let (tries, notes) = chat(&sampled, "Hi\n/retry\n/retry\n");
    let lines: Vec<&str> = tries.lines().collect();
    assert!(lines.len() >= 3 && lines[..lines.len() / 3] != lines[lines.len() / 3..lines.len() / 3 * 2], "{tries}");
    assert_eq!(notes.matches(" tokens/s (prompt: ").count(), 3, "{notes}");
}

#[test]
fn a_chat_switches_adapters() {
    let runs = TrainedRuns::shared();
    let says = |model: &[&str], lines: &str| {
        let options = ["--max-new-tokens", "20", "--device", "cpu"];
        let output = ok(runs.run("trainer", &[&["chat"], model, &options].concat(), lines));
        (text(&output.stdout), text(&output.stderr))
    };
    let (base, adapted) = (says(&["full"], "Hi\n").0, says(&["full", "--adapter", "lora"], "Hi\n").0);
    let lines = "Hi\n/reset\n/adapter lora\nHi\n/reset\n/adapter\nHi\n/reset\n/adapter missing/one\nHi\n";
    let (said, notes) = says(&["full"], lines);
    assert_eq!(said, [base.as_str(), &adapted, &base, &base].concat());
    assert!(notes.contains("the chat continues with the loaded model"), "{notes}");
}

/// The context holds two turns, not many.
#[test]
fn a_long_chat_drops_its_oldest_turns_with_a_warning() {
    let runs = TrainedRuns::shared();
    let lines = "What comes after 3?\n".repeat(12) + &"much too long ".repeat(100) + "\nWhat comes after 3?\n";
    let output = ok(runs.evaluator(&["chat", "--model", "full", "--max-new-tokens", "20"], &lines));
    let said = text(&output.stderr);
    assert!(said.contains("note: the context is full: the oldest 2 messages were dropped"), "{said}");
    assert!(said.contains("the model's context has 128") && said.contains("shorten the message"), "{said}");
    assert!(text(&output.stdout).lines().count() >= 13);
}
