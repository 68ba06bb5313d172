//! The table of input files, with the program that reads each and its exit code for a damaged one.

use std::fs;
use std::path::Path;

use rustix::fs::{CWD, Mode, mkfifoat};
use serde_json::{Value, json};
use suite::root;

/// A file that a program reads.
pub(crate) struct File {
    /// The test that covers it.
    pub(crate) group: &'static str,
    pub(crate) path: &'static str,
    pub(crate) command: &'static [&'static str],
    /// The exit codes of a refusal.
    pub(crate) codes: &'static [i32],
    /// Kinds of damage that leave a file of this kind readable.
    pub(crate) harmless: &'static [&'static str],
}

/// Hostile contents of a file.
pub(crate) struct Attack {
    pub(crate) name: &'static str,
    pub(crate) path: &'static str,
    pub(crate) apply: fn(&Path),
    pub(crate) command: &'static [&'static str],
    pub(crate) code: i32,
    /// Text of the error.
    pub(crate) words: &'static [&'static str],
}

const SCORE: &[&str] = &["evaluator", "score", "--model", "model", "--text", "Say yes."];
const ADAPTED: &[&str] = &["evaluator", "score", "--model", "model", "--adapter", "adapter", "--text", "Say yes."];
const GENERATE: &[&str] =
    &["evaluator", "generate", "--model", "model", "--prompt", "Say yes.", "--max-new-tokens", "2"];
const RUN: &[&str] = &["evaluator", "run", "--model", "model", "--tasks", "choose", "--include-path", "task.yaml"];
const ANSWER: &[&str] = &["evaluator", "answer", "requests.jsonl", "--model", "model"];
const CHECK: &[&str] = &["trainer", "check", "recipe.yaml"];
const TRAIN: &[&str] = &["trainer", "train", "recipe.yaml"];

const EXPORT: &[&str] = &["trainer", "export", "model", "--skip-check", "--output", "exported"];

pub(crate) fn commands() -> [&'static [&'static str]; 8] {
    [SCORE, ADAPTED, GENERATE, RUN, ANSWER, CHECK, TRAIN, EXPORT]
}

const fn file(
    group: &'static str,
    path: &'static str,
    command: &'static [&'static str],
    codes: &'static [i32],
    harmless: &'static [&'static str],
) -> File {
    File { group, path, command, codes, harmless }
}

pub(crate) const FILES: &[File] = &[
    file("model", "model/config.json", SCORE, &[6], &[]),
    file("model", "model/config.json", CHECK, &[2, 6], &[]),
    file("model", "model/tokenizer.json", SCORE, &[3], &[]),
    file("model", "model/tokenizer_config.json", GENERATE, &[3], &[]),
    file("model", "model/generation_config.json", GENERATE, &[3, 6], &[]),
    file("model", "model/model.safetensors", SCORE, &[6], &[]),
    // Any text is a template: a truncated or nested one may still render.
    file("model", "model/chat_template.jinja", GENERATE, &[3], &["empty", "cut", "deep"]),
    file("model", "model/fp8_scales.json", EXPORT, &[6], &[]),
    file("adapter", "adapter/adapter_config.json", ADAPTED, &[3, 6], &[]),
    file("adapter", "adapter/adapter_model.safetensors", ADAPTED, &[6], &[]),
    file("data", "chats.jsonl", TRAIN, &[3], &[]),
    file("data", "questions.jsonl", RUN, &[3], &[]),
    file("data", "requests.jsonl", ANSWER, &[2, 3], &["empty"]),
    file("recipe", "recipe.yaml", CHECK, &[2], &["cut"]),
    // A folder is searched for tasks.
    file("task", "task.yaml", RUN, &[2, 3], &["cut", "folder"]),
];

pub(crate) const ATTACKS: &[Attack] = &[
    Attack {
        name: "an endless template",
        path: "model/chat_template.jinja",
        apply: |path| write(path, "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"),
        command: GENERATE,
        code: 3,
        words: &["chat template"],
    },
    Attack {
        name: "a template that doubles a text 60 times",
        path: "model/chat_template.jinja",
        apply: |path| {
            let body = "{% set ns.t = ns.t ~ ns.t %}".repeat(60);
            write(path, format!("{{% set ns = namespace(t='xxxxxxxx') %}}{body}{{{{ ns.t }}}}"));
        },
        command: GENERATE,
        code: 3,
        words: &["chat template", "longer than 64 MiB"],
    },
    Attack {
        name: "a template of 100,000 nots",
        path: "model/chat_template.jinja",
        apply: |path| write(path, format!("{{{{ {}1 }}}}", "not ".repeat(100_000))),
        command: GENERATE,
        code: 3,
        words: &["chat template"],
    },
    Attack {
        name: "a normalizer with an empty pattern",
        path: "model/tokenizer.json",
        apply: |path| {
            edit(path, |json| {
                json["normalizer"] = json!({"type": "Replace", "pattern": {"Regex": ""}, "content": "x"});
            });
        },
        command: SCORE,
        code: 3,
        words: &["tokenizer.json"],
    },
    Attack {
        name: "a post-processor that names an unknown token",
        path: "model/tokenizer.json",
        apply: |path| {
            edit(path, |json| {
                json["post_processor"] = json!({
                    "type": "TemplateProcessing", "pair": [], "special_tokens": {},
                    "single": [{"SpecialToken": {"id": "<nowhere>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                });
            });
        },
        command: SCORE,
        code: 3,
        words: &["tokenizer.json"],
    },
    Attack {
        name: "a task with a key twice",
        path: "task.yaml",
        apply: |path| append(path, "num_fewshot: 1\nnum_fewshot: 0\n"),
        command: RUN,
        code: 2,
        words: &["num_fewshot", "task.yaml"],
    },
    Attack {
        name: "a task that asks a billion times",
        path: "task.yaml",
        apply: |path| append(path, "repeats: 1000000000\n"),
        command: RUN,
        code: 2,
        words: &["repeats", "task.yaml"],
    },
    Attack {
        name: "two tasks with one name of files",
        path: "task.yaml",
        apply: |path| {
            let task = fs::read_to_string(path).unwrap();
            for (file, name) in [("a.yaml", "a/b"), ("b.yaml", "a b")] {
                write(&path.with_file_name(file), task.replace("task: choose", &format!("task: {name}")));
            }
        },
        command: &["evaluator", "run", "--model", "model", "--tasks", "a.yaml,b.yaml"],
        code: 2,
        words: &["\"a/b\"", "\"a b\""],
    },
    Attack {
        name: "a folder in the place of a run's lock",
        path: "recipe.yaml",
        apply: |path| {
            let folder = path.with_file_name("run");
            fs::create_dir(&folder).unwrap();
            fs::create_dir(folder.join(".lock")).unwrap();
        },
        command: TRAIN,
        code: 6,
        words: &[".lock", "not a regular file"],
    },
    Attack {
        name: "a recipe with a key twice",
        path: "recipe.yaml",
        apply: |path| append(path, "train_iters: 2\n"),
        command: CHECK,
        code: 2,
        words: &["train_iters", "recipe.yaml"],
    },
    Attack {
        name: "a template that doubles a list 60 times",
        path: "model/chat_template.jinja",
        apply: |path| write(path, endless("ns.x + ns.x", 60)),
        command: GENERATE,
        code: 3,
        words: &["chat template", "a list is longer than 1048576 items"],
    },
    Attack {
        name: "a template that nests a list ten million times",
        path: "model/chat_template.jinja",
        apply: |path| {
            let loops =
                "{% for i in range(10000) %}{% for j in range(1000) %}{% set ns.x = [ns.x] %}{% endfor %}{% endfor %}";
            write(path, format!("{{% set ns = namespace(x=[]) %}}{loops}"));
        },
        command: GENERATE,
        code: 3,
        words: &["chat template"],
    },
    Attack {
        name: "a template that raises control characters",
        path: "model/chat_template.jinja",
        apply: |path| write(path, "{{ raise_exception('\x1b[31mred\u{202e}') }}"),
        command: GENERATE,
        code: 3,
        words: &["\\u001b[31mred\\u202e"],
    },
    Attack {
        name: "a task that doubles a list 60 times",
        path: "task.yaml",
        apply: |path| {
            let task = fs::read_to_string(path).unwrap();
            let text = format!("doc_to_text: \"{}\"", endless("ns.x + ns.x", 60));
            write(path, task.replace("doc_to_text: \"Q: {{q}} A:\"", &text));
        },
        command: RUN,
        code: 3,
        words: &["a list is longer than 1048576 items"],
    },
    Attack {
        name: "an adapter whose base was trained again",
        path: "adapter/.candlewick_base.json",
        apply: |path| write(path, r#"{"model": "model", "weights": "0123456789abcdef"}"#),
        command: ADAPTED,
        code: 6,
        words: &["on other weights than those in model", "0123456789abcdef", ".candlewick_base.json"],
    },
    Attack {
        name: "a foreign folder with a temporary name",
        path: "run/model/.global_step_1.tmp/thesis.txt",
        apply: |path| {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            write(path, "mine");
        },
        command: TRAIN,
        code: 6,
        words: &[".global_step_1.tmp", "move it away"],
    },
    Attack {
        name: "an FP8 scale of 0",
        path: "model/fp8_scales.json",
        apply: |path| edit(path, |json| json["model.layers.0.mlp.up_proj"] = json!({"input": 1.0, "weight": 0.0})),
        command: EXPORT,
        code: 6,
        words: &["fp8_scales.json", "model.layers.0.mlp.up_proj", "expected a positive number as `weight`"],
    },
    Attack {
        name: "FP8 scales without a module",
        path: "model/fp8_scales.json",
        apply: |path| edit(path, |json| _ = json.as_object_mut().unwrap().remove("model.layers.0.mlp.down_proj")),
        command: EXPORT,
        code: 6,
        words: &["fp8_scales.json", "it has no entry for model.layers.0.mlp.down_proj"],
    },
    Attack {
        name: "a repetition penalty of 0",
        path: "model/generation_config.json",
        apply: |path| write(path, r#"{"repetition_penalty": 0.0}"#),
        command: GENERATE,
        code: 3,
        words: &["generation_config.json", "repetition_penalty is 0.0"],
    },
    Attack {
        name: "a post-processor with an id beyond the vocabulary",
        path: "model/tokenizer.json",
        apply: |path| {
            edit(path, |json| {
                json["post_processor"] = json!({
                    "type": "TemplateProcessing", "pair": [],
                    "special_tokens": {"<s>": {"id": "<s>", "ids": [99999], "tokens": ["<s>"]}},
                    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                });
            });
        },
        command: SCORE,
        code: 3,
        words: &["tokenizer.json", "99999"],
    },
    Attack {
        name: "a table of characters that claims 4 GB",
        path: "model/tokenizer.json",
        apply: |path| {
            edit(path, |json| {
                json["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": "/////wAA"});
            });
        },
        command: SCORE,
        code: 3,
        words: &["tokenizer.json", "claims 4294967295"],
    },
    Attack {
        name: "a pipe as --samples",
        path: "samples.json",
        apply: pipe,
        command: &with_task("--samples", "samples.json"),
        code: 2,
        words: &["samples.json", "a pipe"],
    },
    Attack {
        name: "a pipe as the base of a recipe",
        path: "base.yaml",
        apply: |path| {
            pipe(path);
            let recipe = path.with_file_name("recipe.yaml");
            write(&recipe, format!("base: base.yaml\n{}", fs::read_to_string(&recipe).unwrap()));
        },
        command: CHECK,
        code: 2,
        words: &["recipe.yaml:1", "a named pipe"],
    },
    Attack {
        name: "a pipe as --messages",
        path: "messages.json",
        apply: pipe,
        command: &["evaluator", "generate", "--model", "model", "--messages", "messages.json"],
        code: 3,
        words: &["messages.json", "a named pipe"],
    },
    Attack {
        name: "a pipe as run.json",
        path: "run/run.json",
        apply: pipe,
        command: &["trainer", "config", "diff", "recipe.yaml", "run"],
        code: 2,
        words: &["run/run.json", "a named pipe"],
    },
    Attack {
        name: "a list as run.json",
        path: "run/run.json",
        apply: |path| {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            write(path, "[]");
        },
        command: &["trainer", "config", "diff", "recipe.yaml", "run"],
        code: 2,
        words: &["run/run.json", "expected a recipe, or the output_dir of a run"],
    },
    Attack {
        name: "a pipe as the metrics of a report",
        path: "run/metrics.jsonl",
        apply: pipe,
        command: &["trainer", "report", "run"],
        code: 2,
        words: &["run/metrics.jsonl", "a pipe"],
    },
    Attack {
        name: "a pipe as the metrics of a summary",
        path: "run/metrics.jsonl",
        apply: pipe,
        command: &["trainer", "watch", "--once", "run"],
        code: 2,
        words: &["run/metrics.jsonl", "a pipe"],
    },
    Attack {
        name: "a pipe as a kept batch",
        path: "step-000001.json",
        apply: pipe,
        command: &["trainer", "replay", "step-000001.json"],
        code: 3,
        words: &["step-000001.json", "a pipe"],
    },
    Attack {
        name: "a pipe as the metrics of a run",
        path: "run/metrics.jsonl",
        apply: pipe,
        command: &["trainer", "train", "recipe.yaml", "output_dir=run"],
        code: 6,
        words: &["run/metrics.jsonl", "a pipe that no process reads"],
    },
    Attack {
        name: "a generation key twice",
        path: "task.yaml",
        apply: |_| (),
        command: &with_task("--gen-kwargs", "temperature=0,temperature=1"),
        code: 2,
        words: &["--gen-kwargs", "temperature is given twice"],
    },
    Attack {
        name: "more examples than documents",
        path: "task.yaml",
        apply: |_| (),
        command: &with_task("--num-fewshot", "4000000000"),
        code: 2,
        words: &["4000000000 few-shot examples", "only 8 documents"],
    },
    Attack {
        name: "two tasks of one name in a folder",
        path: "task.yaml",
        apply: |path| {
            let folder = path.with_file_name("tasks");
            fs::create_dir(&folder).unwrap();
            ["a.yaml", "b.yaml"].iter().for_each(|name| _ = fs::copy(path, folder.join(name)).unwrap());
        },
        command: &["evaluator", "run", "--model", "model", "--tasks", "choose", "--include-path", "tasks"],
        code: 2,
        words: &["choose is defined twice", "tasks/a.yaml", "tasks/b.yaml"],
    },
    Attack {
        name: "an index with two names",
        path: "recipe.yaml",
        apply: |_| (),
        command: &["trainer", "check", "recipe.yaml", "data.sources.0=chats.jsonl", "data.sources.00=b"],
        code: 2,
        words: &["data.sources", "found `00`", "write data.sources.0"],
    },
    Attack {
        name: "a variable of the template that the program sets",
        path: "recipe.yaml",
        apply: |_| (),
        command: &["trainer", "check", "recipe.yaml", "tokenizer.chat_template_kwargs={messages: 5}"],
        code: 2,
        words: &["tokenizer.chat_template_kwargs", "messages is set for each conversation"],
    },
    Attack {
        name: "weights that are not numbers",
        path: "model/model.safetensors",
        apply: |path| {
            let mut bytes = fs::read(path).unwrap();
            let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            bytes[header..].chunks_exact_mut(4).for_each(|number| number.copy_from_slice(&f32::NAN.to_le_bytes()));
            write(path, bytes);
        },
        command: GENERATE,
        code: 5,
        words: &["not finite"],
    },
    Attack {
        name: "garbage after a list of rows",
        path: "chats.json",
        apply: |path| write(path, format!("[{CHAT}]\n[{CHAT}]\ngarbage")),
        command: &with_sources("data.sources=[chats.json]"),
        code: 3,
        words: &["chats.json:3", "expected a list or an object"],
    },
    Attack {
        name: "a Parquet file with another number of rows in its footer",
        path: "chats.parquet",
        apply: |path| {
            let mut file = fs::read(root().join("candle-ext/text/tests/fixtures/chat.parquet")).unwrap();
            let n_footer = u32::from_le_bytes(file[file.len() - 8..file.len() - 4].try_into().unwrap()) as usize;
            let footer = file.len() - 8 - n_footer;
            // The first field with the thrift header 0x16: 5 rows, as a zigzag varint.
            let at = footer + file[footer..].windows(2).position(|bytes| bytes == [0x16, 10]).unwrap();
            file[at + 1] = 12;
            write(path, file);
        },
        command: &with_sources("data.sources=[chats.parquet]"),
        code: 3,
        words: &["chats.parquet", "5 rows", "announces 6"],
    },
    Attack {
        name: "a Parquet file with damaged pages, read by many threads",
        path: "chats.parquet",
        apply: |path| {
            let mut file = fs::read(root().join("candle-ext/text/tests/fixtures/chat.parquet")).unwrap();
            let n_footer = u32::from_le_bytes(file[file.len() - 8..file.len() - 4].try_into().unwrap()) as usize;
            let footer = file.len() - 8 - n_footer;
            file[4..footer].fill(0xff);
            write(path, file);
        },
        command: &["trainer", "train", "recipe.yaml", "data.sources=[chats.parquet]", "data.num_proc=16"],
        code: 3,
        words: &["chats.parquet"],
    },
    Attack {
        name: "a folder in the place of a lock file",
        path: "recipe.yaml.lock",
        apply: |path| fs::create_dir(path).unwrap(),
        command: CHECK,
        code: 2,
        words: &["recipe.yaml.lock", "not a regular file"],
    },
    Attack {
        name: "a pipe in the place of a lock file",
        path: "recipe.yaml.lock",
        apply: |path| mkfifoat(CWD, path, Mode::from_raw_mode(0o600)).unwrap(),
        command: TRAIN,
        code: 2,
        words: &["recipe.yaml.lock", "not a regular file"],
    },
    Attack {
        name: "a lock file that is a dangling link",
        path: "recipe.yaml.lock",
        apply: |path| std::os::unix::fs::symlink("nowhere", path).unwrap(),
        command: CHECK,
        code: 2,
        words: &["recipe.yaml.lock", "No such file"],
    },
    Attack {
        name: "a dangling link in the place of a lock file, for prefetch",
        path: "recipe.yaml.lock",
        apply: |path| std::os::unix::fs::symlink("nowhere", path).unwrap(),
        command: &["trainer", "prefetch", "recipe.yaml"],
        code: 2,
        words: &["recipe.yaml.lock", "No such file"],
    },
    Attack {
        name: "a chain of 40 bases",
        path: "recipe.yaml",
        apply: |path| {
            for base in 0..40 {
                write(&path.with_file_name(format!("{base}.yaml")), format!("base: {}.yaml\n", base + 1));
            }
            append(path, "base: 0.yaml\n");
        },
        command: CHECK,
        code: 2,
        words: &["31.yaml", "a recipe has at most 32 bases", "recipe.yaml -> 0.yaml"],
    },
    Attack {
        name: "a shipped recipe's name that is a dangling link",
        path: "quickstart",
        apply: |path| std::os::unix::fs::symlink("nowhere", path).unwrap(),
        command: &["trainer", "check", "quickstart"],
        code: 2,
        words: &["quickstart", "No such file"],
    },
];

const CHAT: &str = r#"{"messages": [{"role": "user", "content": "Say 1."}, {"role": "assistant", "content": "Yes."}]}"#;

/// Command [`TRAIN`] with other data.
const fn with_sources(sources: &'static str) -> [&'static str; 4] {
    [TRAIN[0], TRAIN[1], TRAIN[2], sources]
}

/// Command [`RUN`] with one more option.
const fn with_task(option: &'static str, value: &'static str) -> [&'static str; 10] {
    let [program, run, model, folder, tasks, task, include, path] =
        [RUN[0], RUN[1], RUN[2], RUN[3], RUN[4], RUN[5], RUN[6], RUN[7]];
    [program, run, model, folder, tasks, task, include, path, option, value]
}

/// A template that repeatedly replaces a list by `expression`.
fn endless(expression: &str, n: usize) -> String {
    format!(
        "{{% set ns = namespace(x=['x']) %}}{{% for i in range({n}) %}}{{% set ns.x = {expression} %}}{{% endfor %}}{{{{ ns.x | length }}}}"
    )
}

pub(super) fn write(path: &Path, bytes: impl AsRef<[u8]>) {
    fs::write(path, bytes).unwrap();
}

/// Creates a named pipe without a writer.
pub(super) fn pipe(path: &Path) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    mkfifoat(CWD, path, Mode::RUSR | Mode::WUSR).unwrap();
}

fn append(path: &Path, text: &str) {
    write(path, fs::read_to_string(path).unwrap() + text);
}

fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut json = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    change(&mut json);
    write(path, json.to_string());
}
