//! The walls between the rooms: which crate may depend on which, and what no source may say.
//! docs/ARCHITECTURE.md has the reasons. A new edge is a decision: change the table in the same commit.

#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::Value;
use suite::{code_of, read, root, rust_files};

/// Every package of the workspace and the packages of the workspace that it may use, tests included: these, and all that
/// they may use.
const ROOMS: &[(&str, &[&str])] = &[
    ("candlewick-ops", &[]),
    ("candlewick-comm", &[]),
    ("candlewick-launch", &["candlewick-comm"]),
    ("candlewick-text", &[]),
    ("candlewick-model", &["candlewick-ops"]),
    ("candlewick-parallel", &["candlewick-comm", "candlewick-model"]),
    ("candlewick-runtime", &["candlewick-comm", "candlewick-model", "candlewick-text"]),
    ("candlewick-inference", &["candlewick-parallel", "candlewick-runtime"]),
    ("evaluator", &["candlewick-inference"]),
    ("trainer", &["evaluator"]),
    ("suite", &["trainer"]),
];

/// Returns the packages of the workspace that `room` may use.
fn below(room: &str) -> BTreeSet<&'static str> {
    let (_, direct) = ROOMS.iter().find(|(name, _)| *name == room).unwrap();
    direct.iter().flat_map(|name| below(name).into_iter().chain([*name])).collect()
}

struct Dependency {
    name: String,
    is_normal: bool,
}

fn dependencies() -> BTreeMap<String, Vec<Dependency>> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--offline", "--no-deps", "--format-version", "1"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    packages.iter().map(|package| (text(&package["name"]), dependencies_of(package))).collect()
}

fn dependencies_of(package: &Value) -> Vec<Dependency> {
    let list = package["dependencies"].as_array().unwrap();
    list.iter().map(|d| Dependency { name: text(&d["name"]), is_normal: d["kind"].is_null() }).collect()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
}

#[test]
fn every_package_has_a_place_in_the_table() {
    let mut found: Vec<_> = dependencies().into_keys().collect();
    let mut listed: Vec<_> = ROOMS.iter().map(|(name, _)| (*name).to_owned()).collect();
    found.sort();
    listed.sort();
    assert_eq!(found, listed);
}

/// Names are edges: a layer's parameters are found once, when it is built.
#[test]
fn a_forward_formats_no_names() {
    for file in ["block.rs", "linear.rs", "weights.rs", "lora/layer.rs"] {
        let code = code_of(&std::path::Path::new("candle-ext/model/src").join(file));
        assert!(!code.contains("format!"), "{file} formats a text");
    }
}

#[test]
fn rooms_depend_only_downwards() {
    let dependencies = dependencies();
    for (room, _) in ROOMS {
        let allowed = below(room);
        for dependency in &dependencies[*room] {
            let name = dependency.name.as_str();
            let is_room = ROOMS.iter().any(|(other, _)| *other == name);
            // A room may turn a feature on for its own tests.
            assert!(
                !is_room || name == *room || allowed.contains(name),
                "{room} depends on {name}, which is not below it"
            );
        }
    }
}

#[test]
fn text_has_no_tensors() {
    for dependency in &dependencies()["candlewick-text"] {
        assert!(!dependency.name.starts_with("candle"), "candlewick-text depends on {}", dependency.name);
    }
}

/// candle-nn's fused ops record no backward; the others are references in the tests of `ops` and `model`.
#[test]
fn candle_nn_is_only_a_test_reference() {
    for (package, list) in dependencies() {
        for dependency in list.iter().filter(|d| d.name == "candle-nn") {
            let is_tested = ["candlewick-ops", "candlewick-model"].contains(&package.as_str());
            assert!(is_tested && !dependency.is_normal, "{package} depends on candle-nn");
        }
    }
}

#[track_caller]
fn check_absent(under: &str, words: &[&str], reason: &str) {
    for path in rust_files(under) {
        for (i, line) in code_of(&path).lines().enumerate() {
            for word in words {
                assert!(!line.contains(word), "{}:{}: `{word}`: {reason}", path.display(), i + 1);
            }
        }
    }
}

#[test]
fn a_world_of_one_takes_the_same_path() {
    let words = ["world_size > 1", "world_size == 1", "world_size != 1", "world_size() > 1", "world_size() == 1"];
    for room in ["candle-ext", "trainer/src", "evaluator/src"] {
        check_absent(room, &words, "a degree of one is a `Solo` group, not a branch");
    }
}

#[test]
fn parallel_has_no_unsafe_code_and_no_family_names() {
    let reason = "the strategies know tensors and seams, neither pointers nor families";
    check_absent("candle-ext/parallel/src", &["unsafe ", "Llama", "Mistral", "Qwen"], reason);
}

#[test]
fn library_rooms_do_not_read_the_environment() {
    for room in ["ops", "comm", "model", "parallel", "inference"] {
        check_absent(&format!("candle-ext/{room}/src"), &["env::var", "env::args"], "settings arrive as values");
    }
}

/// Chats, generation and checkpoints need no task.
#[test]
fn the_trainer_uses_the_evaluator_for_benchmark_tasks_only() {
    let allowed = ["evaluator::task", "evaluator::questions", "evaluator::chat", "evaluator::exit"];
    for path in rust_files("trainer/src") {
        for (i, line) in code_of(&path).lines().enumerate().filter(|(_, line)| line.contains("evaluator::")) {
            let is_allowed = allowed.iter().any(|module| line.contains(module));
            assert!(is_allowed, "{}:{}: {line}", path.display(), i + 1);
        }
    }
}

#[test]
fn unsafe_blocks_say_why_they_are_sound() {
    for room in ["candle-ext", "trainer", "evaluator"] {
        for path in rust_files(room) {
            let text = read(&path);
            let lines: Vec<_> = text.lines().collect();
            for (i, _) in code_of(&path).lines().enumerate().filter(|(_, line)| line.contains("unsafe {")) {
                let above = &lines[i.saturating_sub(8)..=i];
                let says = above.iter().any(|line| line.contains("SAFETY:"));
                assert!(says, "{}:{}: no `// SAFETY:` above this block", path.display(), i + 1);
            }
        }
    }
}

/// A copy to pageable memory may not be done when the driver returns: `to_host` waits for it.
#[test]
fn values_leave_a_device_through_to_host() {
    const READS: &[&str] = &[".to_scalar", ".to_vec0", ".to_vec1", ".to_vec2", ".to_vec3", ".to_device(&Device::Cpu)"];
    // Those that define it, and the tensors of the CPU that comm exchanges.
    const EXEMPT: &[&str] =
        &["candle-ext/ops/src/transfer.rs", "candle-ext/comm/src/staged.rs", "candle-ext/comm/src/collective.rs"];
    for room in ["candle-ext", "trainer/src", "evaluator/src"] {
        let is_source = |path: &&std::path::PathBuf| {
            let path = path.to_string_lossy();
            path.contains("/src/") && !path.contains("tests") && !EXEMPT.contains(&&*path)
        };
        for path in rust_files(room).iter().filter(is_source) {
            let code = code_of(path);
            for statement in code.split([';', '{', '}']).filter(|part| READS.iter().any(|read| part.contains(read))) {
                assert!(
                    statement.contains("to_host("),
                    "{}: `{}` reads a tensor; call to_host first",
                    path.display(),
                    statement.trim()
                );
            }
        }
    }
}

#[test]
fn the_linter_knows_the_functions_that_lose_gradients() {
    let lints = read("clippy.toml");
    for name in ["rms_norm", "layer_norm", "softmax_last_dim", "sdpa"] {
        assert!(lints.contains(&format!("\"candle_nn::ops::{name}\"")), "clippy.toml does not name {name}");
    }
}
