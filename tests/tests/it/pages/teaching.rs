//! The recipes of the pages, and those that they name, teach the answers of the shipped chats.

use serde_json::{Value, json};
use suite::read;

use super::markdown::blocks;
use super::reader::Reader;

/// The learning rates of the tiny model that replaces those of the pages. It is narrow, so it needs higher ones.
const RATE: &str = "1e-3";
const ADAPTER_RATE: &str = "1e-2";

/// The number of answers, of 20, that a trained model repeats word for word: 12 to 18 with all weights, 4 to 13 with an adapter.
const MIN_REPEATED: usize = 8;
const MIN_REPEATED_BY_ADAPTER: usize = 2;

/// A recipe, and its results.
struct Taught {
    /// A page and the name of its file; no page for a shipped recipe.
    page: Option<&'static str>,
    recipe: &'static str,
    rate: &'static str,
    n_steps: usize,
    min_repeated: usize,
}

const TAUGHT: [Taught; 6] = [
    of_page("README.md", "mine.yaml", 50),
    of_page("docs/getting-started.md", "first.yaml", 25),
    Taught { page: None, ..of_page("", "qwen3-0.6b-sft", 50) },
    adapter(Some("docs/getting-started.md"), "lora.yaml", 25),
    adapter(Some("docs/lora.md"), "lora.yaml", 50),
    adapter(None, "qwen3-0.6b-lora", 50),
];

const fn of_page(page: &'static str, recipe: &'static str, n_steps: usize) -> Taught {
    Taught { page: Some(page), recipe, rate: RATE, n_steps, min_repeated: MIN_REPEATED }
}

const fn adapter(page: Option<&'static str>, recipe: &'static str, n_steps: usize) -> Taught {
    Taught { page, recipe, rate: ADAPTER_RATE, n_steps, min_repeated: MIN_REPEATED_BY_ADAPTER }
}

/// Returns the questions and answers of the shipped chats.
fn chats() -> Vec<[String; 2]> {
    let text = read("recipes/chats/chats.jsonl");
    let rows = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    rows.map(|row| [0, 1].map(|turn| row["messages"][turn]["content"].as_str().unwrap().to_owned())).collect()
}

/// Trains the model that replaces those of the pages. It does not answer the questions, unless the system message requests it: a
/// model from the Hub has learned a language before, too.
fn train_base(reader: &Reader) {
    let row = |messages: Value| json!({ "messages": messages }).to_string() + "\n";
    let rows = chats().into_iter().flat_map(|[question, answer]| {
        let question = json!({"role": "user", "content": question});
        let told = json!({"role": "system", "content": "Answer."});
        [
            row(json!([question, {"role": "assistant", "content": "I do not know."}])),
            row(json!([told, question, {"role": "assistant", "content": answer}])),
        ]
    });
    reader.write("base.jsonl", &rows.collect::<String>());
    let config = json!({
        "model_type": "qwen3", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1024,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": true,
    });
    let recipe = json!({
        "type": "sft", "output_dir": "base", "train_iters": 300, "micro_batch_size": 8,
        "model": {"dtype": "f32", "config": config}, "tokenizer": {"name_or_path": "recipes/quickstart/tokenizer"},
        "data": {"sources": ["base.jsonl"], "max_length": 512, "pack_samples": false},
        "optimizer": {"learning_rate": 5e-3}, "scheduler": {"name": "cosine", "warmup_ratio": 0.05},
    });
    reader.write("base-recipe.yaml", &recipe.to_string());
    let output = reader.run("trainer -q train base-recipe.yaml");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Returns the replies to the questions, each in a chat of its own.
fn replies(reader: &Reader, model: &str) -> String {
    let questions: String = chats().iter().map(|[question, _]| format!("{question}\n/reset\n")).collect();
    let chat = format!("trainer chat {model} --temperature 0 --max-new-tokens 160");
    let output = reader.run_with_input(&chat, &format!("{questions}/quit\n"));
    assert!(output.status.success(), "{model}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Counts the answers that are word for word in the replies.
fn n_repeated(replies: &str) -> usize {
    chats().iter().filter(|[_, answer]| replies.contains(answer)).count()
}

/// Trains a recipe with all of its steps.
fn train(reader: &Reader, taught: &Taught) -> Vec<f64> {
    let Taught { page, recipe, rate, .. } = taught;
    if let Some(page) = page.map(read) {
        let blocks = blocks(&page);
        let block = blocks.iter().find(|block| block.file_name() == Some(*recipe)).unwrap();
        reader.write(recipe, &block.text);
    }
    let _ = std::fs::remove_dir_all(reader.path("taught"));
    let keys = format!(
        "model.name_or_path=base optimizer.learning_rate={rate} output_dir=taught checkpoint=null generate=null"
    );
    let output = reader.run(&format!("trainer train {recipe} {keys}"));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !stderr.contains("warning: "), "{page:?} {recipe}: {stderr}");
    let metrics = std::fs::read_to_string(reader.path("taught/metrics.jsonl")).unwrap();
    let records = metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    records.filter_map(|record| record["loss"].as_f64()).collect()
}

#[test]
fn the_recipes_of_the_pages_teach_the_answers_of_their_chats() {
    let reader = Reader::new();
    train_base(&reader);
    let before = replies(&reader, "base");
    assert!(n_repeated(&before) == 0 && before.matches("I do not know.").count() >= 15, "{before}");
    for taught in &TAUGHT {
        let Taught { page, recipe, n_steps, min_repeated, .. } = taught;
        let losses = train(&reader, taught);
        assert_eq!(losses.len(), *n_steps, "{page:?} {recipe}");
        let last: f64 = losses[n_steps - 5..].iter().sum::<f64>() / 5.0;
        assert!(last < 0.5 * losses[0], "{page:?} {recipe}: {losses:?}");
        let after = replies(&reader, "taught");
        assert!(n_repeated(&after) >= *min_repeated, "{page:?} {recipe}: {after}");
    }
}
