//! The command line: output, written files and exit codes.

use std::path::Path;
use std::process::{Command, Output};

const RECIPE: &str = "\
model:
  config: {model_type: llama, vocab_size: 64, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
           num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 128, rms_norm_eps: 1e-5}
tokenizer: {name_or_path: tok}
data: {sources: [a.jsonl]}
";

/// Folder with a recipe and an empty Hub cache.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        std::fs::write(folder.path().join("r.yaml"), RECIPE).unwrap();
        std::fs::write(folder.path().join("a.jsonl"), "{}").unwrap();
        folder
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.run_with(arguments, &[])
    }

    fn run_with(&self, arguments: &[&str], environment: &[(&str, &str)]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_trainer"))
            .args(arguments)
            .current_dir(self.path())
            .env("HF_HOME", self.path().join("hf"))
            .env("HF_ENDPOINT", "http://127.0.0.1:1")
            .env_remove("RUST_BACKTRACE")
            .envs(environment.iter().copied())
            .output()
            .unwrap()
    }

    /// Runs the program; checks the exit code and that stdout or stderr contains `part`.
    #[track_caller]
    fn check(&self, arguments: &[&str], code: i32, part: &str) -> Output {
        let output = self.run(arguments);
        let text = [&output.stdout[..], &output.stderr[..]].concat();
        let text = String::from_utf8_lossy(&text);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}:\n{text}");
        assert!(text.contains(part), "no {part:?} in:\n{text}");
        assert!(!text.contains("panicked"), "{text}");
        output
    }
}

#[test]
fn a_check_prints_the_plan_and_writes_nothing() {
    let folder = Folder::new();
    let output = folder.check(&["check", "r.yaml", "optimizer.lr=1e-4"], 0, "optimizer.learning_rate");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.lines().any(|line| line.contains("0.0001") && line.ends_with("argument")), "{text}");
    let mut files: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    files.sort();
    assert_eq!(files, ["a.jsonl", "r.yaml"]);
}

/// Without a device key, and where the driver sees no GPU.
#[test]
fn experts_that_need_a_gpu_are_refused_before_a_run_without_one() {
    let folder = Folder::new();
    let experts =
        "model_type: qwen3_moe, num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 32, head_dim: 8";
    let recipe =
        RECIPE.replace("model_type: llama", experts).replace("model:\n", "model:\n  experts_implementation: cublas\n");
    std::fs::write(folder.path().join("r.yaml"), recipe).unwrap();
    let no_gpu = [("CUDA_VISIBLE_DEVICES", "")];
    for command in ["check", "train"] {
        let output = folder.run_with(&[command, "r.yaml"], &no_gpu);
        let log = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{command}: {log}");
        for part in ["r.yaml:2:", "experts_implementation: cublas needs a GPU: ", "use fused, the default"] {
            assert!(log.contains(part), "{command}: no {part:?} in {log}");
        }
    }
    for elsewhere in [&["check", "r.yaml", "--ranks", "2"][..], &["mesh", "r.yaml", "--ranks", "2"]] {
        let output = folder.run_with(elsewhere, &no_gpu);
        assert!(output.status.success(), "{elsewhere:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn a_check_prints_json() {
    let folder = Folder::new();
    let output = folder.check(&["check", "--output-format", "json", "r.yaml"], 0, "settings");
    let plan: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(plan["data"]["max_length"], 128);
    assert_eq!(plan["model"]["init"], "random");
    assert_eq!(plan["optimizer"]["learning_rate"], 5e-4);
}

#[test]
fn a_wrong_recipe_exits_with_2_before_anything_is_written() {
    let folder = Folder::new();
    folder.check(&["check", "missing.yaml"], 2, "missing.yaml: cannot read the recipe");
    for command in ["check", "train"] {
        folder.check(&[command, "r.yaml", "optimizer.lrr=1"], 2, "error: argument `optimizer.lrr=1`: unknown key");
        folder.check(&[command, "r.yaml", "beta=0.1"], 2, "not supported; use `type: sft` here, then TRL");
        folder.check(&[command, "r.yaml", "model={name_or_path: ./none}"], 2, "there is no folder ./none");
        folder.check(&[command, "r.yaml", "model.config.model_type=bert"], 2, "r.yaml");
    }
    assert!(!folder.path().join("runs").exists());
}

#[test]
fn a_check_needs_the_model_of_the_hub_only_if_it_is_offline() {
    let folder = Folder::new();
    let model = "model={name_or_path: org/model}";
    folder.check(&["check", "r.yaml", model], 0, "note: data.max_length will be the model's");
    folder.check(&["check", "--offline", "r.yaml", model], 3, "org/model");
}

#[test]
fn a_check_reports_missing_files() {
    let folder = Folder::new();
    folder.check(&["check", "r.yaml", "data.sources=[b.jsonl]"], 3, "failed to find b.jsonl");
    folder.check(&["check", "r.yaml", "data.sources=['b.jsonl:train[:3]']"], 3, "failed to find b.jsonl");
    folder.check(
        &["check", "r.yaml", "tokenizer.name_or_path=./none"],
        3,
        "failed to find ./none: relative paths start at the current folder",
    );
    folder.check(&["check", "--offline", "r.yaml"], 3, "tok");
    folder.check(&["check", "r.yaml", "model.config.num_hiden_layers=3"], 2, "did you mean `num_hidden_layers`?");
    folder.check(&["check", "r.yaml", "model.adapter_name_or_path=none"], 2, "model.adapter_name_or_path: ");
    folder.check(&["check", "r.yaml", "model.peft_config={target_modules: [q_prj]}"], 2, "`q_prj` matches no module");
}

#[test]
fn an_estimate_touches_nothing_and_says_by_its_exit_code_whether_it_fits() {
    let folder = Folder::new();
    folder.check(&["estimate", "r.yaml", "--device", "1GiB"], 0, "fits: ");
    folder.check(&["estimate", "r.yaml", "--device", "20MiB"], 4, "does not fit: ");
    folder.check(&["estimate", "r.yaml", "memory=auto"], 0, "model.activation_checkpoint=none");
    folder.check(&["estimate", "r.yaml", "--device", "h100-80g"], 0, "host RAM");
    folder.check(&["estimate", "r.yaml", "--device", "h1000"], 2, "h100-80g");
    folder.check(&["estimate", "r.yaml", "--ranks", "0"], 2, "expected a number of processes, at least 1");
    folder.check(&["estimate", "r.yaml", "model={name_or_path: org/model}"], 3, "failed to find the model's config");
    let output = folder.check(&["estimate", "r.yaml", "--json", "--device", "1", "checkpoint=none"], 4, "advice");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["format"], &report["fits"], &report["longest_row"]), (&1.into(), &false.into(), &().into()));
    let step = report["phases"][1]["account"].as_object().unwrap();
    let sum: u64 = step.values().map(|bytes| bytes.as_u64().unwrap()).sum();
    assert_eq!(report["peak_bytes"], sum);
    let offload = "deepspeed.zero_optimization.offload_optimizer={device: cpu}";
    let output = folder.check(&["estimate", "r.yaml", "--json", "--device", "t4", offload], 0, "fits");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let account = &report["phases"][2]["account"];
    assert!(account["moments"].is_null() && account["gradients"].is_u64(), "{account}");
    assert!(!folder.path().join("runs").exists());
}

#[test]
fn an_estimate_advises_tiled_mlps_for_dense_models_and_experts() {
    let folder = Folder::new();
    let experts = "model.config={model_type: qwen3_moe, vocab_size: 128, hidden_size: 64, intermediate_size: 128, \
                   moe_intermediate_size: 32, num_experts: 4, num_experts_per_tok: 2, num_hidden_layers: 2, \
                   num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, max_position_embeddings: 2048}";
    let advises_tiles = |arguments: &[&str]| {
        let arguments = [&["estimate", "r.yaml", "--json", "--device", "1"], arguments].concat();
        let output = folder.check(&arguments, 4, "advice");
        String::from_utf8_lossy(&output.stdout).contains("\"tiled_mlp_compute\": true")
    };
    assert!(advises_tiles(&[]));
    assert!(advises_tiles(&[experts]));
}

#[test]
fn a_missing_recipe_is_an_error_with_the_command_that_lists_them() {
    let folder = Folder::new();
    folder.check(&["train", "nosuch.yaml"], 2, "`trainer recipes ls` lists the recipes");
    folder.check(&["train"], 2, "`trainer recipes ls` lists the recipes");
    folder.check(&["train", "quickstrat"], 2, "did you mean the shipped recipe `quickstart`?");
}

/// Completes the last of `words` as bash does, which splits words at `=`. The words are separated by spaces.
#[track_caller]
fn completed(words: &str) -> Vec<String> {
    let program = env!("CARGO_BIN_EXE_trainer");
    let script = format!(
        "source <({program} completions bash)\nCOMP_WORDS=(trainer {words})\nCOMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n\
         last=${{COMP_WORDS[COMP_CWORD]}}\n_clap_complete_trainer trainer \"${{last#=}}\" x\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    );
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("mine.yaml"), "").unwrap();
    std::fs::write(folder.path().join("other.txt"), "").unwrap();
    let output = Command::new("bash").args(["--norc", "-c", &script]).current_dir(folder.path()).output().unwrap();
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8(output.stdout).unwrap();
    lines.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

#[test]
fn bash_completes_commands_recipes_keys_and_values() {
    let check = |words: &str, want: &[&str]| assert_eq!(completed(words), want, "{words}");
    check("prep", &["preprocess"]);
    check("train quick", &["quickstart"]);
    check("recipes cp quick", &["quickstart"]);
    check("train m", &["mixtral-8x7b-sft", "mixtral-8x7b-lora", "mine.yaml"]);
    check("train o", &[]);
    check("train r.yaml optimizer.betas", &["optimizer.betas="]);
    check("train r.yaml checkpoint.0.save_every_n_st", &["checkpoint.0.save_every_n_steps="]);
    check("train r.yaml data.pack_samples = ", &["true", "false"]);
    check("train r.yaml seed = 3 data.pack_samples = f", &["false"]);
    check("train r.yaml model.dtype = bf", &["bf16"]);
    check("config explain data.pack_samp", &["data.pack_samples"]);
}

#[test]
fn a_wrong_command_line_exits_with_2() {
    let folder = Folder::new();
    folder.check(&["trian", "r.yaml"], 2, "a similar subcommand exists: 'train'");
    folder.check(&["check", "r.yaml", "--oflfine"], 2, "--offline");
    folder.check(&["check", "r.yaml", "-q", "-v"], 2, "cannot be used with");
    folder.check(&["check", "r.yaml", "lr"], 2, "expected KEY=VALUE");
    for (arguments, want) in [
        (&["--train_iters", "3"][..], "train_iters=3"),
        (&["--train-iters=3"], "train_iters=3"),
        (&["--max_steps", "3"], "train_iters=3"),
        (&["--learning_rate"], "optimizer.learning_rate=VALUE"),
    ] {
        folder.check(
            &[&["train", "r.yaml"], arguments].concat(),
            2,
            &format!("write recipe keys as KEY=VALUE, after the recipe: {want}"),
        );
    }
    folder.check(&["check", "r.yaml", "-v", "epochz=1"], 2, "top-level keys: type,");
    folder.check(&["check"], 2, "<RECIPE>");
    // merge takes no recipe.
    let output = folder.run(&["merge", "--lr", "3"]);
    assert!(!String::from_utf8_lossy(&output.stderr).contains("recipe keys as"));
}

#[test]
fn help_version_and_schema_exit_with_0() {
    let folder = Folder::new();
    folder.check(&["--help"], 0, "Exit codes:");
    folder.check(&["train", "--help"], 0, "Examples:");
    folder.check(&["--version"], 0, env!("CARGO_PKG_VERSION"));
    folder.check(&["version"], 0, env!("CARGO_PKG_VERSION"));
    for variable in ["CANDLEWICK_KERNELS", "CANDLEWICK_CUTLASS"] {
        let output = folder.run_with(&["version"], &[(variable, "/no/such/folder")]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(variable) && said.contains("/no/such/folder is no folder"), "{said}");
        assert_eq!(output.status.code(), Some(2), "{said}");
    }
    let output = folder.run_with(&["version"], &[("CANDLEWICK_CPU_GEMM", "avx1024")]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("CANDLEWICK_CPU_GEMM") && said.contains("this processor has"), "{said}");
    assert_eq!(output.status.code(), Some(2), "{said}");
    let output = folder.check(&["schema"], 0, "additionalProperties");
    serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap();
}
