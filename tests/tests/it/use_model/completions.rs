//! Completions and replies of `trainer generate`: prompts, chat templates, stop texts and limits.

use std::fs;

use serde_json::Value;

use super::{MESSAGES, TrainedRuns, ok, text};

#[test]
fn a_completion_without_a_chat_template_ends_with_eos() {
    let runs = TrainedRuns::shared();
    let (chat, plain) = (runs.path("full/model/global_step_24"), runs.path("no-template"));
    fs::create_dir(&plain).unwrap();
    for entry in fs::read_dir(chat).unwrap().map(Result::unwrap) {
        let name = entry.file_name();
        if entry.path().is_file() && name != "chat_template.jinja" {
            fs::copy(entry.path(), plain.join(name)).unwrap();
        }
    }
    let config = plain.join("tokenizer_config.json");
    let mut tokenizer: Value = serde_json::from_str(&fs::read_to_string(&config).unwrap()).unwrap();
    tokenizer.as_object_mut().unwrap().remove("chat_template");
    fs::write(config, tokenizer.to_string()).unwrap();
    runs.write("pairs.jsonl", "{\"prompt\": \"The wolf\", \"completion\": \" says yes.\"}\n");
    runs.write("plain.jsonl", "{\"text\": \"The wolf says yes.\"}\n");
    let tokens = |data: &str, eos: &[&str]| {
        let arguments = [&["--model", "no-template", "--data", data], eos].concat();
        runs.perplexity(&arguments)["tokens"].as_u64().unwrap()
    };
    let without = ["--add-eos-token", "false"];
    assert_eq!(tokens("pairs.jsonl", &[]), tokens("pairs.jsonl", &without) + 1);
    assert_eq!(tokens("plain.jsonl", &[]), tokens("plain.jsonl", &without));
}

/// The chat template renders the prompt of a conversation.
#[test]
fn system_messages_and_conversations_reach_the_model() {
    let runs = TrainedRuns::shared();
    let turn = |role: &str, content: &str| format!("<|im_start|>{role}\n{content}<|im_end|>\n");
    let generate =
        |arguments: &[&str], stdin: &str| runs.says(&[&["generate", "--model", "full"], arguments].concat(), stdin);
    let raw = |prompt: &str| generate(&["--raw", "--prompt", &format!("{prompt}<|im_start|>assistant\n")], "");
    let with_system = raw(&(turn("system", "Be brief.") + &turn("user", "Hi")));
    assert_ne!(with_system, raw(&turn("user", "Hi")), "the test sees the system message");
    assert_eq!(generate(&["--system", "Be brief.", "--prompt", "Hi"], ""), with_system);
    assert_eq!(generate(&["--system", "Be brief.", "--prompt", "-"], "Hi\n"), with_system);
    let turns = [("system", "Be brief."), ("user", "What comes after 3?"), ("assistant", "4"), ("user", "And then?")];
    let whole = raw(&turns.map(|(role, content)| turn(role, content)).concat());
    assert_eq!(generate(&["--messages", "-"], MESSAGES), whole);
    let two = generate(&["--prompt", "Hi", "--prompt", "Ho"], "");
    assert!(two.contains("> Hi\n") && two.contains("> Ho\n"), "{two}");
    let refused = |arguments: &[&str], stdin: &str| {
        runs.evaluator(&[&["generate", "--model", "full"], arguments].concat(), stdin)
    };
    runs.refuses(&refused(&["--messages", "-"], "nonsense"), 3, &["neither JSON nor JSON lines"]);
    runs.refuses(&refused(&["--messages", "eval.jsonl"], ""), 3, &["conversation 1", "ends with the assistant's"]);
    runs.refuses(&refused(&["--messages", "-", "--system", "x"], MESSAGES), 3, &["a system message of its own"]);
    runs.refuses(&refused(&[], ""), 2, &["--prompt"]);
    let by_trainer = ["generate", "full", "--system", "Be brief.", "--prompt", "-", "--device", "cpu"];
    let output = ok(runs.run("trainer", &by_trainer, "Hi\n"));
    assert_eq!(text(&output.stdout), generate(&["--system", "Be brief.", "--prompt", "-"], "Hi\n"));
}

#[test]
fn variables_reach_the_chat_template() {
    let runs = TrainedRuns::shared();
    let folder = runs.copy_model("with-mood");
    fs::write(folder.join("chat_template.jinja"), "{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}")
        .unwrap();
    let generate = |arguments: &[&str]| {
        // The penalty makes answers depend on the prompt.
        let options = ["generate", "with-mood", "--device", "cpu", "--repetition-penalty", "1.5"];
        let arguments = [&options, arguments].concat();
        text(&ok(runs.run("trainer", &arguments, "")).stdout)
    };
    let plain = generate(&["--raw", "--prompt", "wolf What comes after 3?"]);
    let mood = ["--chat-template-kwargs", "{\"mood\": \"wolf \"}"];
    assert_eq!(generate(&[&["--prompt", "What comes after 3?"], &mood[..]].concat()), plain);
    assert_ne!(generate(&["--prompt", "What comes after 3?"]), plain);
}

#[test]
fn a_chat_template_by_name_replaces_the_models() {
    let runs = TrainedRuns::shared();
    let generate = |arguments: &[&str]| {
        let options = ["generate", "--model", "full", "--repetition-penalty", "1.5"];
        runs.says(&[&options, arguments].concat(), "")
    };
    let chat = generate(&["--prompt", "What comes after 3?", "--chat-template", "zephyr"]);
    let prompt = "<|user|>\nWhat comes after 3?<|im_end|>\n<|assistant|>\n";
    assert_eq!(chat, generate(&["--raw", "--prompt", prompt]));
    assert_ne!(chat, generate(&["--prompt", "What comes after 3?"]));
    let refused = |arguments: &[&str], phrases: &[&str]| runs.refuses(&runs.evaluator(arguments, ""), 2, phrases);
    let model = ["generate", "--model", "full", "--prompt", "a", "--chat-template"];
    refused(&[&model[..], &["chatlm"]].concat(), &["`chatlm` is neither", "did you mean `chatml`?"]);
    refused(&[&model[..], &["gemma"]].concat(), &["no token <start_of_turn>", "chatml, qwen2.5, qwen3"]);
    runs.write(
        "chat.jsonl",
        "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": \"b\"}]}\n",
    );
    let score = ["score", "--model", "full", "--data", "chat.jsonl"];
    let scores = |template: &[&str]| runs.says(&[&score[..], template].concat(), "");
    assert_ne!(scores(&["--chat-template", "zephyr"]), scores(&[]));
}

#[test]
fn a_generation_ends_before_a_stop_text() {
    let runs = TrainedRuns::shared();
    let generate = |stop: &[&str]| runs.says(&[&["generate", "--model", "full", "--prompt", "Hi"], stop].concat(), "");
    let whole = generate(&[]);
    let stop: String = whole.chars().skip(2).take(2).collect();
    assert_eq!(
        generate(&["--stop", "never in there", "--stop", &stop]).trim_end_matches('\n'),
        &whole[..whole.find(&stop).unwrap()]
    );
    let refused = runs.evaluator(&["generate", "--model", "full", "--prompt", "a", "--stop", ""], "");
    runs.refuses(&refused, 2, &["--stop '': expected a text that is not empty"]);
}

#[test]
fn the_context_bounds_prompts_and_answers() {
    let runs = TrainedRuns::shared();
    let long = "word ".repeat(200);
    let generate = |arguments: &[&str]| runs.evaluator(&[&["generate", "--model", "full"], arguments].concat(), "");
    runs.refuses(&generate(&["--prompt", &long]), 3, &["failed to generate: the prompt has", "context has 128"]);
    runs.refuses(&generate(&["--prompt", "a", "--max-new-tokens", "99999999999"]), 2, &["context has 128 tokens"]);
    runs.refuses(&generate(&["--prompt", "a", "--temperature", "nan"]), 2, &["--temperature NaN"]);
    let score = runs.evaluator(&["score", "--model", "full", "--text", &long], "");
    runs.refuses(&score, 3, &["failed to score text: it has", "context has 128"]);
    // The context has a position for this token, but not for the next.
    let full = ok(generate(&["--raw", "--prompt", "a", "--max-new-tokens", "127", "--temperature", "50"]));
    assert!(!text(&full.stdout).is_empty());
}
