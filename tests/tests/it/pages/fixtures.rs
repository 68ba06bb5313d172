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
    ("trainer convert torchtune.yaml", foreign_files),
    ("trainer watch runs/mine", earlier_runs),
    ("trainer replay runs/mine", spiky_run),
    ("--lora-modules sql=runs/sql-lora", two_adapters),
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
    train(reader, "my-run", &json!({"data": data, "checkpoint": checkpoint}));
}

fn my_lora(reader: &Reader) {
    adapter(reader, "my-lora", 4);
}

/// Trains adapters of different ranks.
fn two_adapters(reader: &Reader) {
    adapter(reader, "sql-lora", 4);
    adapter(reader, "chat-lora", 8);
}

fn adapter(reader: &Reader, name: &str, rank: usize) {
    let model = json!({
        "name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct", "dtype": "f32",
        "peft_config": {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": "all-linear"},
    });
    train(reader, name, &json!({"train_iters": 2, "model": model}));
}

/// Trains a run with these keys into `runs/NAME`.
fn train(reader: &Reader, name: &str, keys: &Value) {
    let mut keys = keys.clone();
    keys["output_dir"] = format!("runs/{name}").into();
    reader.write(&format!("{name}.yaml"), &smollm2(&keys));
    succeeds(reader, &format!("trainer -q train {name}.yaml"));
}

fn fp8_run(reader: &Reader) {
    train(reader, "mine", &json!({"train_iters": 2, "precision": {"recipe": "delayed"}}));
}

fn earlier_runs(reader: &Reader) {
    for name in ["mine", "first", "second"] {
        train(reader, name, &json!({"train_iters": 2, "checkpoint": "none"}));
    }
}

/// Trains rows that are alike, one a step, and one of rare characters in step 41.
fn spiky_run(reader: &Reader) {
    let row = |step: usize| {
        let answer = if step == 41 { "§ΩЖ¿ÞßЇ漢字§ΩЖ¿ÞßЇ漢字" } else { "Yes. Yes. Yes. Yes." };
        let question = format!("Is {} a number?", step % 4);
        let messages = [json!({"role": "user", "content": question}), json!({"role": "assistant", "content": answer})];
        json!({ "messages": messages }).to_string() + "\n"
    };
    reader.write("spiky.jsonl", &(1..=42).map(row).collect::<String>());
    let keys = json!({
        "data": {"sources": ["spiky.jsonl"], "max_length": 128, "order": "sequential", "pack_samples": false},
        "micro_batch_size": 1, "gradient_accumulation_steps": 1, "scheduler": {"name": "constant"}, "optimizer": {"learning_rate": 1e-2},
        "loss_watchdog": {"rolling_interval_length": 16, "warmup_steps": 24, "sigma_factor": 8},
        "checkpoint": {"type": "sharded", "output_dir": "runs/mine/checkpoints", "save_every_n_steps": 40},
    });
    train(reader, "mine", &keys);
}

/// Writes files of torchtune, LLaMA-Factory and picotron, and the model folder and the data that they name.
fn foreign_files(reader: &Reader) {
    base(reader);
    for name in ["torchtune.yaml", "llama-factory.yaml", "picotron.json"] {
        reader.write(name, &suite::read(format!("tests/tests/fixtures/foreign/{name}")));
    }
    reader.write("corpus.txt", &suite::read("docs/GLOSSARY.md"));
    reader.write("data/dataset_info.json", &suite::read("tests/tests/fixtures/foreign/dataset_info.json"));
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
