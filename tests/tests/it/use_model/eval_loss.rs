//! The loss and perplexity of texts and chats, compared with the eval loss of training.

use std::fs;

use serde_json::{Value, json};

use super::{TrainedRuns, ok, rows, text};

#[test]
fn the_perplexity_of_chats_equals_the_eval_loss_of_training() {
    let runs = TrainedRuns::shared();
    for (run, model) in [("full", "full/model/global_step_24"), ("lora", "lora")] {
        let measured = runs.perplexity(&["--model", model, "--data", "eval.jsonl"]);
        let (loss, want) = (measured["loss"].as_f64().unwrap(), runs.eval_loss(run));
        assert!((loss - want).abs() < 1e-6, "{loss} {want}");
        assert_eq!(measured["rows"], 10);
        assert!((measured["perplexity"].as_f64().unwrap() - loss.exp()).abs() < 1e-9);
    }
    // Equal rows with other column names.
    let renamed = fs::read_to_string(runs.path("eval.jsonl"))
        .unwrap()
        .replace("\"user\"", "\"human\"")
        .replace("\"assistant\"", "\"bot\"");
    runs.write("renamed.jsonl", &renamed);
    let want = runs.perplexity(&["--model", "full", "--data", "eval.jsonl"]);
    let mapped = runs.perplexity(&[
        "--model",
        "full",
        "--data",
        "renamed.jsonl",
        "--role-mapping",
        "user=messages.role.human",
        "--role-mapping",
        "assistant=messages.role.bot",
    ]);
    assert_eq!(mapped, want);
    let all = runs.perplexity(&["--model", "full", "--data", "eval.jsonl", "--mask-inputs", "false"]);
    assert!(all["tokens"].as_u64() > want["tokens"].as_u64());
    assert_eq!(runs.perplexity(&["--model", "full", "--data", "eval.jsonl", "--limit", "3"])["rows"], 3);
}

#[test]
fn the_perplexity_of_a_text_equals_the_eval_loss_of_causal_training() {
    let runs = TrainedRuns::shared();
    runs.write("corpus.txt", &"The wolf says yes.\n\nA cloud comes after 3.\n".repeat(37));
    let model = json!({"dtype": "f32", "name_or_path": runs.path("full")});
    let recipe = json!({
        "type": "causal", "output_dir": runs.path("causal"), "train_iters": 1, "device": "cpu", "model": model,
        "data": {
            "sources": [runs.path("corpus.txt")], "eval_sources": [runs.path("corpus.txt")], "max_length": 128,
            "cache_dir": runs.path("cache"),
        },
        "optimizer": {"learning_rate": 1e-3},
    });
    runs.write("causal.yaml", &recipe.to_string());
    ok(runs.run("trainer", &["-q", "train", "causal.yaml"], ""));
    let words = ["--model", "causal", "--data", "corpus.txt", "--truncation", "split"];
    let measured = runs.perplexity(&[&words[..], &["--add-eos-token"]].concat());
    let (loss, want) = (measured["loss"].as_f64().unwrap(), runs.eval_loss("causal"));
    assert!((loss - want).abs() < 1e-6, "{loss} {want}");
    assert_eq!(measured["rows"], 1);
    assert!(measured["tokens"].as_u64() > runs.perplexity(&words)["tokens"].as_u64());
    let lines = runs.perplexity(&[&words[..], &["--sample-by", "line"]].concat());
    assert_eq!(lines["rows"], 2 * 37, "each line that is not blank is a row");
    let whole = runs.evaluator(&["score", "--model", "causal", "--data", "corpus.txt"], "");
    runs.refuses(&whole, 3, &["corpus.txt:1", "tokens, and the model's context has 128", "--truncation split"]);
}

#[test]
fn a_row_longer_than_the_context_is_named_unless_it_may_be_cut() {
    let runs = TrainedRuns::shared();
    let row =
        json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c ".repeat(100)}]});
    runs.write("long.jsonl", &format!("{}{row}\n", rows(0..1)));
    let arguments = ["score", "--model", "full", "--data", "long.jsonl"];
    runs.refuses(&runs.evaluator(&arguments, ""), 3, &["long.jsonl:2", "context has 128"]);
    let tokens = |truncation: &str| {
        let output = runs.perplexity(&["--model", "full", "--data", "long.jsonl", "--truncation", truncation]);
        output["tokens"].as_u64().unwrap()
    };
    let (dropped, cut, split) = (tokens("drop"), tokens("truncate"), tokens("split"));
    assert!(dropped < cut && cut < split, "{dropped} {cut} {split}");
}

#[test]
fn perplexity_reports_the_oddities_that_training_reports() {
    let runs = TrainedRuns::shared();
    let row = |answer: &Value| json!({"messages": [{"role": "user", "content": "a"}, answer]}).to_string() + "\n";
    let empty = row(&json!({"role": "assistant", "content": ""}));
    runs.write("empty.jsonl", &(rows(0..1) + &empty));
    let output = ok(runs.evaluator(&["score", "--model", "full", "--data", "empty.jsonl"], ""));
    let said = text(&output.stderr);
    for what in ["hold an empty answer", "have no target tokens and are skipped"] {
        assert!(said.contains(&format!("warning: 1 of 2 rows {what}, the first at")), "{said}");
    }
    assert_eq!(serde_json::from_slice::<Value>(&output.stdout).unwrap()["rows"], 1);
    let call = json!({"type": "function", "function": {"name": "f", "arguments": {}}});
    let calls = row(&json!({"role": "assistant", "content": null, "tool_calls": [call]}));
    runs.write("calls.jsonl", &(rows(0..1) + &calls));
    let refused = runs.evaluator(&["score", "--model", "full", "--data", "calls.jsonl"], "");
    runs.refuses(
        &refused,
        3,
        &[
            "failed to render 1 of 2 rows",
            "tool calls, or answers of reasoning alone, that chat template",
            "calls.jsonl:2",
        ],
    );
}

#[test]
fn max_length_limits_the_sequences_of_perplexity() {
    let runs = TrainedRuns::shared();
    runs.write("words.txt", &"The wolf says yes. ".repeat(60));
    let words = ["--model", "full", "--data", "words.txt", "--truncation", "split"];
    let tokens = |length: &str| runs.perplexity(&[&words[..], &["--max-length", length]].concat())["tokens"].as_u64();
    assert_eq!(tokens("128"), runs.perplexity(&words)["tokens"].as_u64());
    assert!(tokens("32") < tokens("128"), "the first token of a piece has no loss");
    let data = ["score", "--model", "full", "--data", "words.txt", "--max-length"];
    runs.refuses(&runs.evaluator(&[&data[..], &["16"]].concat(), ""), 3, &["words.txt:1", "--max-length is 16"]);
    runs.refuses(&runs.evaluator(&[&data[..], &["129"]].concat(), ""), 2, &["the model's context of 128"]);
}

#[test]
fn the_former_command_perplexity_names_its_successor() {
    let runs = TrainedRuns::shared();
    let rows = |command: &'static str| runs.evaluator(&[command, "--model", "full", "--data", "eval.jsonl"], "");
    let (former, score) = (ok(rows("perplexity")), ok(rows("score")));
    assert_eq!(former.stdout, score.stdout);
    assert!(text(&former.stderr).contains("note: `evaluator perplexity` is now `evaluator score`"));
    runs.refuses(&runs.evaluator(&["score", "--model", "full"], ""), 2, &["--text <TEXT>|--data <DATA>"]);
}
