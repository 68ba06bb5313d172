//! The layering of the crates: allowed dependencies, and words that are forbidden in their sources.
//! docs/ARCHITECTURE.md has the reasons. A new edge is a decision: change the table in the same commit.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;
use suite::{code_of, read, root, rust_files};

/// Every package of the workspace with the packages that it may use, tests included. Use is transitive.
const LAYERS: &[(&str, &[&str])] = &[
    ("candlewick-ops", &[]),
    ("candlewick-comm", &[]),
    ("candlewick-command-line", &[]),
    ("candlewick-html", &[]),
    ("candlewick-launch", &["candlewick-comm", "candlewick-command-line"]),
    ("candlewick-text", &[]),
    ("candlewick-model", &["candlewick-ops", "candlewick-text"]),
    ("candlewick-parallel", &["candlewick-comm", "candlewick-model"]),
    ("candlewick-runtime", &["candlewick-comm", "candlewick-command-line", "candlewick-model", "candlewick-text"]),
    ("candlewick-inference", &["candlewick-parallel", "candlewick-runtime"]),
    ("evaluator", &["candlewick-inference", "candlewick-command-line", "candlewick-html"]),
    ("trainer", &["evaluator"]),
    ("suite", &["trainer", "candlewick-launch"]),
];

/// Returns the packages of the workspace that `layer` may use.
fn below(layer: &str) -> BTreeSet<&'static str> {
    let (_, direct) = LAYERS.iter().find(|(name, _)| *name == layer).unwrap();
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
    let mut listed: Vec<_> = LAYERS.iter().map(|(name, _)| (*name).to_owned()).collect();
    found.sort();
    listed.sort();
    assert_eq!(found, listed);
}

/// A layer looks up its parameters by name once, when it is built.
#[test]
fn the_forward_pass_formats_no_names() {
    for file in [
        "linear.rs",
        "weights.rs",
        "lora/layer.rs",
        "mixer/attention/forward.rs",
        "mlp/swiglu/forward.rs",
        "mlp/moe/forward.rs",
        "mlp/moe/experts.rs",
    ] {
        let code = code_of(&std::path::Path::new("candle-ext/model/src").join(file));
        assert!(!code.contains("format!"), "{file} formats a string");
    }
}

#[test]
fn crates_depend_only_downwards() {
    let dependencies = dependencies();
    for (layer, _) in LAYERS {
        let allowed = below(layer);
        for dependency in &dependencies[*layer] {
            let name = dependency.name.as_str();
            let is_layer = LAYERS.iter().any(|(other, _)| *other == name);
            // A crate may depend on itself to enable a feature in its tests.
            assert!(
                !is_layer || name == *layer || allowed.contains(name),
                "{layer} depends on {name}, which is not below it"
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

/// candle-nn's fused ops record no backward; its other ops are references in the tests of `ops` and `model`.
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

/// An exempt file and the reason.
type Exemption = (&'static str, &'static str);

const LOCAL_GROUP: &str = "the constructor of a world of one rank";
const NO_PEER: &str = "liveness: no rank waits for a rank that is alone";
const MESSAGE: &str = "a note, an error or a line of a report";

/// Files that compare a degree with 1.
const DEGREE_EXEMPT: &[Exemption] = &[
    ("candle-ext/comm/src/liveness/keep_alive.rs", NO_PEER),
    ("candle-ext/comm/src/local/mod.rs", LOCAL_GROUP),
    ("candle-ext/comm/src/threads/mod.rs", LOCAL_GROUP),
    ("candle-ext/comm/src/rank_env/torchrun.rs", "a missing local rank has one possible value in a world of one"),
    ("candle-ext/inference/src/command/chat.rs", "a launcher stops all of several ranks at Ctrl-C"),
    ("candle-ext/inference/src/parallel_config.rs", NO_PEER),
    ("candle-ext/model/src/layer.rs", "one rank has the whole mixer, which no mixer refuses"),
    ("candle-ext/parallel/src/assembly.rs", "ring attention and vocabulary-parallel cross-entropy round differently"),
    (
        "candle-ext/parallel/src/expert_parallel/mod.rs",
        "the experts of one rank have a faster kernel for a single token",
    ),
    ("candle-ext/parallel/src/params/reducer.rs", "the gradients of one rank are not sent, so they are not rounded"),
    ("candle-ext/runtime/src/cores.rs", "eager kernel loading costs start-up time and is needed by NCCL only"),
    ("trainer/src/cli/convert.rs", MESSAGE),
    ("trainer/src/cli/mesh.rs", MESSAGE),
    ("trainer/src/fp8_advice/mod.rs", "tensor parallel ranks exchange a norm before layers quantize it"),
    ("trainer/src/estimate/costs.rs", "a ring of one rank receives no keys and values"),
    ("trainer/src/estimate/micro_batch.rs", "one stage has no bubble"),
    ("trainer/src/estimate/report.rs", MESSAGE),
    ("trainer/src/resolve/backend.rs", MESSAGE),
    ("trainer/src/resolve/deepspeed.rs", MESSAGE),
    ("trainer/src/resolve/moe.rs", MESSAGE),
    ("trainer/src/resolve/pipeline.rs", MESSAGE),
    ("trainer/src/resolve/ranks.rs", "a note, and one shard is ZeRO stage 0"),
    ("trainer/src/run/describe.rs", MESSAGE),
    ("trainer/src/run_report/tables.rs", MESSAGE),
];

/// Files above `ops` and `comm` that read the device of a tensor.
const DEVICE_EXEMPT: &[Exemption] = &[
    ("candle-ext/inference/src/answer/batch.rs", "the batch size depends on the kind of device"),
    ("candle-ext/inference/src/command/model.rs", "the order of sums depends on the kind of device"),
    ("candle-ext/inference/src/ranks.rs", "the communication backend depends on the kind of device"),
    ("trainer/src/fp8_advice/mod.rs", "the advice names the device"),
    ("trainer/src/run/build.rs", "offloading and peak FLOPs depend on the kind of device"),
    ("trainer/src/run/connect.rs", "the communication backend depends on the kind of device"),
    ("trainer/src/run/out_of_memory.rs", "the report names the device"),
    ("trainer/src/run/session/mod.rs", "the metrics read the GPU's utilisation"),
];

/// Files above `ops` and `comm` that write to the terminal themselves.
const TERMINAL_EXEMPT: &[Exemption] = &[
    ("candle-ext/inference/src/command/chat_input.rs", "it restores the terminal at a signal"),
    ("candle-ext/inference/src/command/reply_printer.rs", "it escapes the parts of a reply, and adds a style"),
    ("candle-ext/runtime/src/allocator.rs", "it reports the end of memory, without allocations"),
    ("candle-ext/runtime/src/progress/bars.rs", "the writer of print_note and of the log"),
    ("candle-ext/runtime/src/terminal.rs", "the functions that escape control characters"),
    ("trainer/src/cli/preprocess/mod.rs", "it escapes the samples, and adds colours"),
];

/// Checks that the exempt files, and no others, have a line that `breaks` the rule.
#[track_caller]
fn check_exempt(files: &[PathBuf], breaks: impl Fn(&str) -> bool, exempt: &[Exemption], rule: &str) {
    let found: BTreeMap<String, usize> = files
        .iter()
        .filter(|path| path.to_string_lossy().contains("/src/") && !path.ends_with("tests.rs"))
        .filter_map(|path| Some((path.display().to_string(), code_of(path).lines().position(&breaks)? + 1)))
        .collect();
    let is_exempt = |path: &str| exempt.iter().any(|(file, _)| *file == path);
    let new: Vec<_> = found.iter().filter(|(path, _)| !is_exempt(path)).collect();
    let gone: Vec<_> = exempt.iter().filter(|(file, _)| !found.contains_key(*file)).collect();
    assert!(new.is_empty() && gone.is_empty(), "{rule}\nnot exempt: {new:?}\nno longer needed: {gone:?}");
}

fn files_of(folders: &[&str]) -> Vec<PathBuf> {
    folders.iter().flat_map(|folder| rust_files(folder)).collect()
}

/// Returns true if a line compares a degree of parallelism or the size of a group with 1.
fn compares_a_degree(line: &str) -> bool {
    const DEGREES: &[&str] = &[
        "context",
        "degree",
        "n_parts",
        "n_ranks",
        "n_replicas",
        "n_shards",
        "n_stages",
        "size",
        "stages",
        "tensor",
        "world_size",
    ];
    [" > 1", " == 1", " != 1", " <= 1", " < 2", " >= 2"].iter().any(|comparison| {
        line.match_indices(comparison).any(|(at, _)| {
            let is_whole =
                !line[at + comparison.len()..].starts_with(|c: char| c.is_alphanumeric() || c == '_' || c == '.');
            let left = line[..at].trim_end_matches("()");
            let name = left.rsplit(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
            is_whole && DEGREES.contains(&name)
        })
    })
}

/// Returns true if a line branches on the kind of a device.
fn reads_a_device(line: &str) -> bool {
    let words = [".is_cpu()", ".is_cuda()", "Device::Cpu =>", "Device::Cuda(", "DeviceLocation::"];
    let is_word = |(at, _): (usize, &str)| !line[..at].ends_with(char::is_alphanumeric);
    words.iter().any(|word| word.starts_with('.') && line.contains(word) || line.match_indices(word).any(is_word))
}

#[test]
fn a_degree_of_one_takes_the_same_path() {
    let files = files_of(&["candle-ext", "trainer/src", "evaluator/src"]);
    check_exempt(&files, compares_a_degree, DEGREE_EXEMPT, "a degree of one is a `Solo` group, not a branch");
}

#[test]
fn comparisons_of_a_degree_with_one_are_found() {
    for line in ["if group.size() == 1 {", "let x = world_size <= 1;", "groups.cp.size() * groups.sp.size() > 1"] {
        assert!(compares_a_degree(line), "{line}");
    }
    for line in ["size == 10", "size > 1.5", "n_tokens > 1", "rank() == 1", "group.size() > n"] {
        assert!(!compares_a_degree(line), "{line}");
    }
}

#[test]
fn crates_above_ops_do_not_read_the_device_of_a_tensor() {
    let crates = ["model", "parallel", "inference", "runtime", "text", "launch"].map(|it| format!("candle-ext/{it}"));
    let mut folders: Vec<&str> = crates.iter().map(String::as_str).collect();
    folders.extend(["trainer/src", "evaluator/src"]);
    check_exempt(&files_of(&folders), reads_a_device, DEVICE_EXEMPT, "`ops` has an arm for each device");
}

/// Returns the type for which a line implements a trait of mixers or MLPs.
fn kind_of_sublayer(line: &str) -> Option<&str> {
    let traits = ["MixerSpec", "Mixer", "MlpSpec", "Mlp"];
    traits.iter().find_map(|name| line.strip_prefix(&format!("impl {name} for "))?.split([' ', '<']).next())
}

/// Returns the public and private types that implement a mixer or an MLP.
fn kinds_of_sublayers() -> BTreeSet<String> {
    let code = files_of(&KINDS_OF_SUBLAYERS).into_iter().map(|path| code_of(&path));
    code.flat_map(|code| code.lines().filter_map(kind_of_sublayer).map(str::to_owned).collect::<Vec<_>>()).collect()
}

const KINDS_OF_SUBLAYERS: [&str; 2] = ["candle-ext/model/src/mixer", "candle-ext/model/src/mlp"];

/// Files outside of the kinds' folders that name one.
const KIND_EXEMPT: &[Exemption] = &[
    ("candle-ext/model/src/lib.rs", "re-exports"),
    ("candle-ext/model/src/upcycle/tensors.rs", "it makes the weights of experts from those of a dense MLP"),
];

/// A new mixer or MLP is a file in its folder. A layer calls it through a trait.
#[test]
fn only_its_folder_names_a_kind_of_mixer_or_mlp() {
    let kinds = kinds_of_sublayers();
    assert!(["SelfAttentionSpec", "SwiGlu", "MoeSpec"].iter().all(|kind| kinds.contains(*kind)), "{kinds:?}");
    let names_a_kind =
        |line: &str| line.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| kinds.contains(word));
    let mut files = files_of(&["candle-ext", "trainer/src", "evaluator/src"]);
    files.retain(|path| !KINDS_OF_SUBLAYERS.iter().any(|folder| path.starts_with(folder)));
    check_exempt(&files, names_a_kind, KIND_EXEMPT, "a layer calls mixers and MLPs through a trait");
}

#[test]
fn parallel_has_no_unsafe_code_and_no_family_names() {
    let reason = "the strategies implement `TokenParallel` and `SequenceMixing`, neither pointers nor model families";
    check_absent("candle-ext/parallel/src", &["unsafe ", "Llama", "Mistral", "Qwen"], reason);
}

/// The numbers and states of an optimizer are known to its file and its op.
#[test]
fn the_terms_of_adamw_stand_in_its_files_only() {
    const OWN: &[&str] = &["candle-ext/ops/src/adamw/", "candle-ext/parallel/src/optimizer/adamw.rs"];
    // Keys of recipes, in the words of several toolkits.
    const KEYS: &[&str] = &["trainer/src/recipe/", "trainer/src/convert/"];
    let files = files_of(&["candle-ext", "trainer/src", "evaluator/src"]);
    let is_bound = |path: &&PathBuf| {
        let path = path.to_string_lossy();
        path.contains("/src/") && !path.contains("/tests/") && !OWN.iter().chain(KEYS).any(|own| path.starts_with(own))
    };
    for path in files.iter().filter(is_bound) {
        for (i, line) in code_of(path).lines().enumerate() {
            for word in ["exp_avg", "beta1", "beta2", "bias_correction"] {
                assert!(!line.contains(word), "{}:{}: `{word}` belongs to the file of AdamW", path.display(), i + 1);
            }
        }
    }
    let of_parallel = files_of(&["candle-ext/parallel/src"]);
    for path in of_parallel.iter().filter(is_bound).filter(|path| !path.ends_with("optimizer/mod.rs")) {
        let code = code_of(path).to_lowercase();
        assert!(!code.contains("adamw"), "{}: names a kind of optimizer", path.display());
    }
}

#[test]
fn the_engine_names_no_router() {
    let reason = "features of some layers declare side outputs; `parallel/src/routing` has what a step does for them";
    let words = ["router", "Router", "expert", "Expert", "moe()", "MoE"];
    check_absent("candle-ext/parallel/src/engine", &words, reason);
}

#[test]
fn objectives_are_chosen_by_the_plan() {
    let reason = "the plan holds the objective";
    check_absent("trainer/src", &["CausalLm"], reason);
}

#[test]
fn library_crates_do_not_read_the_environment() {
    for layer in ["ops", "comm", "model", "parallel", "inference"] {
        check_absent(&format!("candle-ext/{layer}/src"), &["env::var", "env::args"], "settings arrive as values");
    }
}

/// Chat, generation and checkpoints need no task.
#[test]
fn the_trainer_uses_the_evaluator_for_benchmark_tasks_only() {
    let allowed = ["evaluator::task", "evaluator::evaluation", "evaluator::chat", "evaluator::exit"];
    for path in rust_files("trainer/src") {
        for (i, line) in code_of(&path).lines().enumerate().filter(|(_, line)| line.contains("evaluator::")) {
            let is_allowed = allowed.iter().any(|module| line.contains(module));
            assert!(is_allowed, "{}:{}: {line}", path.display(), i + 1);
        }
    }
}

#[test]
fn unsafe_blocks_say_why_they_are_sound() {
    for layer in ["candle-ext", "trainer", "evaluator"] {
        for path in rust_files(layer) {
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
    // The files that define it, and comm's exchange of CPU tensors.
    const EXEMPT: &[&str] =
        &["candle-ext/ops/src/transfer.rs", "candle-ext/comm/src/staged.rs", "candle-ext/comm/src/collective.rs"];
    for layer in ["candle-ext", "trainer/src", "evaluator/src"] {
        let is_source = |path: &&std::path::PathBuf| {
            let path = path.to_string_lossy();
            path.contains("/src/") && !path.contains("tests") && !EXEMPT.contains(&&*path)
        };
        for path in rust_files(layer).iter().filter(is_source) {
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

/// Text of models, files and servers reaches the terminal with escaped control characters only.
#[test]
fn one_module_writes_to_the_terminal() {
    const PROGRAMS: &[&str] =
        &["candle-ext/inference", "candle-ext/runtime", "candle-ext/text", "evaluator", "trainer"];
    const WRITES: &[&str] =
        &["print!(", "println!(", "stdout().lock()", "stderr().lock()", "stderr().write", "(io::stdout(),"];
    fn writes(line: &str) -> bool {
        WRITES.iter().any(|word| line.contains(word))
    }
    check_exempt(&files_of(PROGRAMS), writes, TERMINAL_EXEMPT, "use candlewick_runtime::terminal");
}

/// The open of a pipe waits for its writer, and a device may have no end.
#[test]
fn programs_open_regular_files_only() {
    const PROGRAMS: &[&str] =
        &["candle-ext/inference", "candle-ext/runtime", "candle-ext/text", "evaluator", "trainer"];
    const EXEMPT: &[Exemption] = &[
        ("candle-ext/text/src/files.rs", "the functions that check a file's type"),
        ("candle-ext/text/src/template/budget.rs", "files of the kernel"),
        ("evaluator/src/environment.rs", "files of the kernel and the system"),
        ("trainer/src/data/cache.rs", "it syncs files that it wrote"),
        ("trainer/src/estimate/free_ram.rs", "files of the kernel"),
    ];
    fn opens(line: &str) -> bool {
        const OPENS: &[&str] = &[" File::open(", "(File::open(", "fs::read(", "fs::read_to_string("];
        OPENS.iter().any(|word| line.contains(word)) && !line.contains("\"/proc") && !line.contains("\"/sys")
    }
    let is_test = |path: &PathBuf| path.to_string_lossy().contains("/tests/");
    let files: Vec<PathBuf> = files_of(PROGRAMS).into_iter().filter(|path| !is_test(path)).collect();
    check_exempt(&files, opens, EXEMPT, "use candlewick_text::files");
}
