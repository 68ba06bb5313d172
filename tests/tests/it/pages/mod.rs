//! The commands of all pages run as printed, in the order of the page, on tiny models under the documented Hub ids.
//!
//! A block that cannot run here has a comment with the reason in the line above it, and is in [`NOT_RUN`].

mod fixtures;
mod hub_cache;
mod markdown;
mod messages;
mod reader;
mod teaching;

use std::collections::BTreeSet;
use std::fs;

use suite::{read, tracked_files};

use markdown::{Block, Marker, blocks};
use reader::Reader;

/// Blocks that the tests do not run: page, first command, reason.
const NOT_RUN: &[(&str, &str, &str)] = &[
    ("README.md", "cargo test --workspace --locked", "it contains this test"),
    ("docs/distributed.md", "cargo build --release --features trainer/mpi", "needs MPI and two nodes"),
    ("docs/distributed.md", "mpirun -H node0,node1 -x CANDLEWICK_STORE_SECRET", "needs MPI and two nodes"),
    ("docs/first-runs.md", "set train_iters=20", "needs torch and the weights of SmolLM2"),
    ("docs/getting-started.md", "cargo build --release", "the tests have their own build"),
    ("docs/gpu-results.md", "scripts/gpu-check --draw 1 --call A", "needs a GPU"),
    ("docs/gpu-results.md", "scripts/gpu-wheels", "the build takes 25 minutes"),
    ("docs/gpu-results.md", "tar -xf target/gpu/bin.tar.xz", "needs a GPU"),
    ("docs/gpu.md", "export CANDLEWICK_CUTLASS_HEADERS", "needs NVIDIA's compiler"),
    ("docs/launch.md", "env -u SLURM_PROCID", "needs Slurm"),
    ("docs/launch.md", "export CANDLEWICK_STORE_SECRET=", "needs two nodes"),
    ("docs/launch.md", "mpirun -n 2 target/release/launch --world", "needs MPI"),
    ("docs/launch.md", "scripts/launch --nnodes 2 --node-rank 0", "needs two nodes"),
    ("docs/launch.md", "scripts/launch --nnodes 2 --rdzv-backend c10d", "needs two nodes"),
    ("docs/multi-gpu.md", "scripts/launch --standalone --nproc-per-node gpu", "needs GPUs"),
    ("docs/serving.md", "trainer serve HuggingFaceTB/SmolLM2-135M-Instruct", "needs lm-eval"),
    ("docs/use-your-model.md", "echo 'FROM ./my-model-gguf", "needs ollama"),
    ("docs/use-your-model.md", "llama-cli -m my-model-gguf", "needs llama.cpp"),
    ("docs/use-your-model.md", "vllm serve merged", "needs vLLM"),
    ("tests/reference/README.md", "pip install torch==2.15.0", "needs a package index"),
];

/// The page whose results `the_runs_of_getting_started_lower_the_loss` checks.
const GETTING_STARTED: &str = "docs/getting-started.md";

/// The page whose commands have a Hub server.
const OFFLINE: &str = "docs/offline.md";

/// The page whose replay `the_replay_of_running_prints_the_lines_of_its_page` compares.
const RUNNING: &str = "docs/running.md";

/// Declares a test for each of the other pages with commands, and the list of them.
macro_rules! pages {
    ($($test:ident: $page:literal)*) => {
        const PAGES: &[&str] = &[$($page),*];

        $(
            #[test]
            fn $test() {
                follow($page);
            }
        )*
    };
}

pages! {
    the_commands_of_the_readme_succeed: "README.md"
    the_commands_of_adding_a_task_succeed: "docs/adding-a-task.md"
    the_commands_of_converting_succeed: "docs/converting.md"
    the_commands_of_distributed_succeed: "docs/distributed.md"
    the_commands_of_evaluating_succeed: "docs/evaluating.md"
    the_commands_of_evaluate_succeed: "docs/evaluate.md"
    the_commands_of_export_and_serve_succeed: "docs/export-and-serve.md"
    the_commands_of_fp8_succeed: "docs/fp8.md"
    the_commands_of_full_fine_tuning_succeed: "docs/full-fine-tuning.md"
    the_commands_of_launch_succeed: "docs/launch.md"
    the_commands_of_long_context_succeed: "docs/long-context.md"
    the_commands_of_lora_succeed: "docs/lora.md"
    the_commands_of_memory_succeed: "docs/memory.md"
    the_commands_of_monitoring_succeed: "docs/monitoring.md"
    the_commands_of_moe_succeed: "docs/moe.md"
    the_commands_of_moe_training_succeed: "docs/moe-training.md"
    the_commands_of_multi_gpu_succeed: "docs/multi-gpu.md"
    the_commands_of_own_data_succeed: "docs/own-data.md"
    the_commands_of_recipes_succeed: "docs/recipes.md"
    the_commands_of_serving_succeed: "docs/serving.md"
    the_commands_of_use_your_model_succeed: "docs/use-your-model.md"
}

/// Follows a page from its beginning to its end.
fn follow(path: &str) -> Reader {
    follow_as(Reader::new(), path)
}

/// Follows a page in the folder of a reader.
fn follow_as(mut reader: Reader, path: &str) -> Reader {
    let page = read(path);
    fixtures::prepare(&reader, &page);
    reader.follow(&page);
    reader
}

/// Returns the pages with commands, without the generated ones.
fn pages_with_commands() -> BTreeSet<String> {
    let paths = tracked_files().into_iter().filter(|path| path.extension().is_some_and(|e| e == "md"));
    let has_commands = |path: &String| blocks(&read(path)).iter().any(|block| block.has_commands());
    paths.map(|path| path.display().to_string()).filter(has_commands).collect()
}

#[test]
fn every_page_with_commands_is_followed_by_a_test() {
    let has_one_that_runs = |path: &String| blocks(&read(path)).iter().any(Block::runs);
    let pages: BTreeSet<_> = pages_with_commands().into_iter().filter(has_one_that_runs).collect();
    let followed = PAGES.iter().chain([&GETTING_STARTED, &OFFLINE, &RUNNING, &messages::PAGE]);
    assert_eq!(pages, followed.map(|page| (*page).to_owned()).collect());
}

#[test]
fn the_blocks_that_no_test_runs_are_listed_with_their_reasons() {
    let mut found = Vec::new();
    for path in pages_with_commands() {
        for block in blocks(&read(&path)).iter().filter(|block| block.has_commands()) {
            if let Marker::NotRun(reason) = block.marker {
                let command = block.commands().remove(0);
                let listed = NOT_RUN.iter().find(|(page, start, _)| *page == path && command.starts_with(start));
                let place = format!("{path}:{}", block.line);
                let listed = listed.unwrap_or_else(|| panic!("{place}: NOT_RUN does not list {command}"));
                assert_eq!(listed.2, reason, "{place}");
                found.push(listed.1);
            }
        }
    }
    found.sort_unstable();
    let mut listed: Vec<_> = NOT_RUN.iter().map(|(_, command, _)| *command).collect();
    listed.sort_unstable();
    assert_eq!(found, listed);
}

#[test]
fn the_commands_of_offline_succeed_and_only_prefetch_sends_requests() {
    let reader = follow_as(Reader::online(), OFFLINE);
    let (prefetches, others): (Vec<_>, Vec<_>) =
        reader.followed.iter().partition(|followed| followed.command.contains(" prefetch "));
    assert!(prefetches.iter().any(|prefetch| prefetch.n_requests > 0));
    assert!(others.len() >= 8, "only {} commands", others.len());
    for other in others {
        assert_eq!(other.n_requests, 0, "{}", other.command);
    }
}

#[test]
fn the_replay_of_running_prints_the_lines_of_its_page() {
    let reader = follow(RUNNING);
    let page = read(RUNNING);
    let blocks = blocks(&page);
    let shown = blocks.iter().find(|block| block.text.starts_with("$ trainer replay")).unwrap();
    let printed = String::from_utf8_lossy(&reader.followed.last().unwrap().output.stdout);
    let printed = printed.replace(reader.path("").to_str().unwrap(), "/data/");
    let shown: Vec<_> = shown.text.lines().skip(1).take_while(|line| *line != "...").collect();
    assert_eq!(printed.lines().take(shown.len()).collect::<Vec<_>>(), shown, "{printed}");
}

#[test]
fn the_runs_of_getting_started_lower_the_loss() {
    let page = read(GETTING_STARTED);
    let reader = follow(GETTING_STARTED);
    let losses = reader.losses();
    assert!(losses.len() == 3 && losses[1] < losses[0] && losses[2] < losses[0], "{losses:?}");
    let written = fs::read_dir(reader.path("results/first")).unwrap().count();
    assert_eq!(written, 1, "one folder for the model's results");
    check_folders(&page, &reader);
    let rows = read("recipes/chats/chats.jsonl");
    let blocks = blocks(&page);
    let shown = blocks.iter().find(|block| block.language == "json").unwrap();
    assert_eq!(shown.text.trim_end(), rows.lines().next().unwrap(), "the row on the page is the first row of the file");
}

/// Checks that the folders of the Python snippets hold a model or an adapter, and a tokenizer.
fn check_folders(page: &str, reader: &Reader) {
    let blocks = blocks(page);
    let snippets = blocks.iter().filter(|block| block.language == "python");
    let lines = snippets.flat_map(|block| block.text.lines()).filter(|line| line.starts_with("folder = "));
    let folders: Vec<_> = lines.flat_map(|line| line.split('"').skip(1).step_by(2)).collect();
    assert_eq!(folders.len(), 3, "{folders:?}");
    for folder in folders {
        let has = |name: &str| reader.path(folder).join(name).is_file();
        let is_model = has("config.json") && has("model.safetensors");
        let is_adapter = has("adapter_config.json") && has("adapter_model.safetensors");
        assert!((is_model || is_adapter) && has("tokenizer.json"), "{folder}");
    }
}
