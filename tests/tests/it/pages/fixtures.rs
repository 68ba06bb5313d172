//! Files that a page presupposes: runs, recipes and data with the names that the page uses.

use serde_json::{Value, json};

use super::hub_cache::copy;
use super::reader::Reader;

/// A function that creates files in the reader's folder.
type FixtureFn = fn(&Reader);

/// Names in pages, each with the function that creates the file or folder.
const FIXTURES: &[(&str, FixtureFn)] = &[
    ("recipe.yaml", recipe),
    ("runs/my-run", my_run),
    ("runs/my-lora", my_lora),
    ("runs/mine --tasks", fp8_run),
    ("--model base", base),
    ("chat.json", chat),
    ("held-out.jsonl", held_out),
    ("chats.jsonl data.eval_sources", held_out),
    ("data/arc_easy", arc_easy),
    ("data/mmlu", mmlu),
    ("results/before", results),
    ("capitals.yaml", capitals),
];

/// Creates the files that a page names and does not create itself.
pub(super) fn prepare(reader: &Reader, page: &str) {
    for (_, create) in FIXTURES.iter().filter(|(name, _)| page.contains(name)) {
        create(reader);
    }
}

#[track_caller]
fn succeeds(reader: &Reader, command: &str) {
    let output = reader.run(command);
    assert!(output.status.success(), "{command}\n{}", String::from_utf8_lossy(&output.stderr));
}

/// Returns a recipe of SmolLM2's tiny replacement, with keys of the run.
fn smollm2(keys: &Value) -> String {
    let mut recipe = json!({
        "type": "sft", "model": {"name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct", "dtype": "f32"},
        "data": {"sources": ["recipes/chats/chats.jsonl"], "max_length": 256}, "optimizer": {"learning_rate": 1e-3},
    });
    recipe.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    recipe.to_string()
}

fn recipe(reader: &Reader) {
    reader
        .write("recipe.yaml", &smollm2(&json!({"train_iters": 2, "checkpoint": "none", "output_dir": "runs/recipe"})));
}

/// Trains an epoch of 40 rows, with a sharded checkpoint and an export.
fn my_run(reader: &Reader) {
    let checkpoint = json!([
        {"type": "sharded", "output_dir": "runs/my-run/checkpoints", "save_end_of_training": true},
        {"type": "huggingface", "output_dir": "runs/my-run/model", "save_end_of_training": true},
    ]);
    let data = json!({"sources": ["recipes/chats/chats.jsonl", "recipes/chats/chats.jsonl"], "max_length": 256});
    let keys = json!({"output_dir": "runs/my-run", "data": data, "checkpoint": checkpoint});
    reader.write("my-run.yaml", &smollm2(&keys));
    succeeds(reader, "trainer -q train my-run.yaml");
}

fn my_lora(reader: &Reader) {
    let model = json!({
        "name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct", "dtype": "f32",
        "peft_config": {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    });
    reader.write("my-lora.yaml", &smollm2(&json!({"output_dir": "runs/my-lora", "train_iters": 2, "model": model})));
    succeeds(reader, "trainer -q train my-lora.yaml");
}

fn fp8_run(reader: &Reader) {
    let keys = json!({"output_dir": "runs/mine", "train_iters": 2, "precision": {"recipe": "delayed"}});
    reader.write("mine.yaml", &smollm2(&keys));
    succeeds(reader, "trainer -q train mine.yaml");
}

fn base(reader: &Reader) {
    let snapshots = reader.path("hf-home/hub/models--HuggingFaceTB--SmolLM2-135M-Instruct/snapshots");
    let snapshot = std::fs::read_dir(snapshots).unwrap().next().unwrap().unwrap().path();
    copy(&snapshot, &reader.path("base"));
}

fn chat(reader: &Reader) {
    reader.write("chat.json", r#"[{"role": "user", "content": "Who are you?"}]"#);
}

fn held_out(reader: &Reader) {
    for (copied, name) in [("eval", "held-out"), ("chats", "chats")] {
        let rows = suite::read(format!("recipes/chats/{copied}.jsonl"));
        reader.write(&format!("{name}.jsonl"), &rows);
    }
}

fn arc_easy(reader: &Reader) {
    let row = json!({
        "question": "Which animal barks?", "choices": {"text": ["a dog", "a cat"], "label": ["A", "B"]}, "answerKey": "A",
    });
    for file in ["arc_easy_test", "arc_easy/train", "arc_easy/test"] {
        reader.write(&format!("data/{file}.jsonl"), &format!("{row}\n").repeat(8));
    }
}

fn mmlu(reader: &Reader) {
    let row = json!({"question": "What is 4 plus 2?", "subject": "x", "choices": ["6", "7", "8", "9"], "answer": 0});
    for task in ["virology", "marketing"] {
        for split in ["dev", "test"] {
            reader.write(&format!("data/mmlu/{task}_{split}.jsonl"), &format!("{row}\n").repeat(8));
        }
    }
}

fn results(reader: &Reader) {
    for name in ["before", "after"] {
        let model = "--model HuggingFaceTB/SmolLM2-135M-Instruct --tasks arc_easy --log-samples";
        succeeds(reader, &format!("evaluator run {model} --output-path results/{name}"));
    }
}

fn capitals(reader: &Reader) {
    let row = json!({"country": "France", "cities": ["Paris", "Lyon"], "answer": 0});
    for split in ["train", "test"] {
        reader.write(&format!("capitals/{split}.jsonl"), &format!("{row}\n").repeat(8));
    }
}
