//! The recipes of the pages, and those that they name, teach the shipped chats.

use serde_json::Value;
use suite::read;

use super::markdown::blocks;
use super::reader::Reader;

/// The learning rate. The tiny models that replace those of the pages are narrow and random, so they need a higher one.
const RATE: &str = "optimizer.learning_rate=1e-2";

/// A recipe of a page by its file name, or a shipped one.
enum Taught {
    Page { page: &'static str, file: &'static str },
    Shipped(&'static str),
}

/// The losses of a run.
struct Losses {
    train: Vec<f64>,
    eval: Vec<f64>,
}

/// Trains a recipe as it is, except for the learning rate.
fn losses(recipe: &Taught) -> Losses {
    let reader = Reader::new();
    let name = match recipe {
        Taught::Page { page, file } => {
            let text = read(page);
            let blocks = blocks(&text);
            let block = blocks.iter().find(|block| block.file_name() == Some(file)).unwrap();
            reader.write(file, &block.text);
            file
        }
        Taught::Shipped(name) => name,
    };
    let output = reader.run(&format!("trainer train {name} {RATE} output_dir=taught checkpoint=none generate=null"));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !stderr.contains("warning: "), "{name}: {stderr}");
    let metrics = std::fs::read_to_string(reader.path("taught/metrics.jsonl")).unwrap();
    let records: Vec<Value> = metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |key: &str| records.iter().filter_map(|record| record[key].as_f64()).collect();
    Losses { train: of("loss"), eval: of("loss/eval") }
}

/// Checks the number of steps, and that both losses fall to less than `factor` times the first.
#[track_caller]
fn check(recipe: &Taught, n_steps: usize, factor: f64) {
    let Losses { train, eval } = losses(recipe);
    assert_eq!(train.len(), n_steps);
    let last: f64 = train[n_steps - 5..].iter().sum::<f64>() / 5.0;
    assert!(last < factor * train[0], "{train:?}");
    // The first evaluation may follow the first epoch.
    assert!(eval.len() >= 5 && eval[eval.len() - 1] < factor * train[0], "{eval:?}");
}

#[test]
fn the_recipe_of_the_readme_teaches() {
    check(&Taught::Page { page: "README.md", file: "mine.yaml" }, 50, 0.5);
}

#[test]
fn the_shipped_recipe_of_chats_teaches() {
    check(&Taught::Shipped("qwen3-0.6b-sft"), 50, 0.5);
}

/// An adapter of a random model learns little, because embeddings and head are frozen.
#[test]
fn the_adapter_of_the_lora_page_learns() {
    check(&Taught::Page { page: "docs/lora.md", file: "lora.yaml" }, 50, 0.99);
}
