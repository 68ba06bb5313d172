//! `--deterministic batch_invariant`: a request has the same bits alone and in a batch.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use candlewick_ops::cpu_gemm_kernel;
use serde_json::json;

use crate::support::{export, export_experts};

/// Returns requests of all kinds: short and long ones, equal contexts, and a single token.
fn requests() -> String {
    let mut lines = Vec::new();
    let shared = "Q: Is snow cold? A: yes\n\nQ: Is fire cold? A:";
    for (context, continuation) in [
        (shared, " no"),
        (shared, " yes"),
        (shared, " maybe it is not"),
        ("Say wolf 4 times.", " wolf wolf"),
        ("a", "b"),
        ("", "Spell the word cloud."),
        ("The quick fox, the lazy dog. The quick fox.", " It ran"),
    ] {
        lines.push(json!({"type": "loglikelihood", "context": context, "continuation": continuation}));
    }
    for n in [1, 3, 9] {
        lines.push(json!({"type": "loglikelihood_rolling", "text": "The quick fox, the lazy dog. ".repeat(n)}));
    }
    for prompt in ["Say wolf 4 times.", "W", shared] {
        lines.push(json!({"type": "generate_until", "context": prompt, "until": ["zq"], "max_gen_toks": 8}));
    }
    lines.iter().map(|line| format!("{line}\n")).collect()
}

/// Answers the requests on the CPU.
fn answer(model: &Path, requests: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_evaluator"));
    command.arg("answer").arg(requests).arg("-M").arg(model).args(["--device", "cpu"]).args(arguments);
    command.env("HF_HUB_OFFLINE", "1").env("RAYON_NUM_THREADS", "2").stdin(Stdio::null());
    command.output().unwrap()
}

/// Returns the responses of a model.
fn answers(model: &Path, requests: &Path, arguments: &[&str]) -> String {
    let output = answer(model, requests, arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_request_has_the_same_bits_alone_and_in_a_batch() {
    if cpu_gemm_kernel() == "gemm" {
        eprintln!("skipped: this processor's matmuls depend on the number of rows");
        return;
    }
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let models = [export(folders[0].path(), 3), export_experts(folders[1].path(), 3)];
    let path = folders[0].path().join("requests.jsonl");
    fs::write(&path, requests()).unwrap();
    for model in models {
        for dtype in ["float32", "bfloat16"] {
            let of = |batch: &str| {
                answers(&model, &path, &["--deterministic", "batch_invariant", "--dtype", dtype, "--batch-size", batch])
            };
            let alone = of("1");
            for batch in ["16", "3", "auto"] {
                assert_eq!(of(batch), alone, "{} {dtype} {batch}", model.display());
            }
        }
    }
}

#[test]
fn attention_whose_plan_depends_on_the_batch_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let model = export(folder.path(), 3);
    let path = folder.path().join("requests.jsonl");
    fs::write(&path, requests()).unwrap();
    let invariant = ["--deterministic", "batch_invariant", "--attn-implementation"];
    let output = answer(&model, &path, &[&invariant[..], &["cudnn"]].concat());
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    let want = "--attn-implementation cudnn contradicts --deterministic batch_invariant: its plan depends on the batch";
    assert!(error.contains(want), "{error}");
}
