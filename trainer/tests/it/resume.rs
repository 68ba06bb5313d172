//! Resuming: an interrupted run ends with the weights of an uninterrupted one, bit for bit.

#[cfg(debug_assertions)]
use std::os::unix::process::ExitStatusExt;

use candlewick_model::AdapterFolder;
use candlewick_text::template::BuiltInTemplate;
use candlewick_text::tokenizer::Tokenizer;

use crate::support::{Run, stderr};

/// Failpoints that kill the run, one at each start. A checkpoint is due every 5 steps.
#[cfg(debug_assertions)]
const FAILPOINTS: [&str; 11] = [
    "cache_written:0",
    "engine_built:0",
    "step_computed:3",
    "checkpoint_written:5",
    "checkpoint_published:5",
    "step_computed:8",
    "checkpoint_written:10",
    "step_computed:12",
    "checkpoint_published:15",
    "export_started:24",
    "export_published:24",
];

/// Two entries that keep one checkpoint each: the checkpoint of step 4 replaces that of step 2.
const KEEPS_ONE: [&str; 6] = [
    "eval_interval=2",
    "metric_for_best_model=loss",
    "checkpoint.0.save_every_n_steps=2",
    "checkpoint.0.save_total_limit=1",
    "checkpoint.1.save_every_n_steps=2",
    "checkpoint.1.save_total_limit=1",
];

/// The end of a run of four steps.
const FOUR_STEPS: [&str; 2] = ["train_iters=4", "checkpoint.1.save_end_of_training=false"];

/// Release builds have no failpoints. Unit tests stop the writing of a checkpoint at each file operation.
#[cfg(debug_assertions)]
#[test]
fn a_run_killed_several_times_ends_with_the_same_weights() {
    let whole = Run::new();
    whole.train_ok(&[]);
    let killed = Run::new();
    for failpoint in FAILPOINTS {
        let output = killed.command("train", &[]).env("CANDLEWICK_TEST_KILL_AT", failpoint).output().unwrap();
        assert_eq!(output.status.signal(), Some(libc::SIGKILL), "{failpoint}: {}", stderr(&output));
    }
    killed.train_ok(&[]);
    assert!(killed.report()["resumed_from"].is_string(), "{}", killed.report()["resumed_from"]);
    assert!(whole.exported() == killed.exported(), "the weights differ");
}

/// Kills a run at each failpoint, starts it again, and compares its folders and records with those of a run that was not
/// killed.
#[cfg(debug_assertions)]
#[track_caller]
fn check_killed_at(arguments: &[&str], failpoints: &[&str]) {
    let arguments = &[&KEEPS_ONE[..], arguments].concat();
    let whole = Run::new();
    whole.train_ok(arguments);
    for failpoint in failpoints {
        let killed = Run::new();
        let output = killed.command("train", arguments).env("CANDLEWICK_TEST_KILL_AT", failpoint).output().unwrap();
        assert_eq!(output.status.signal(), Some(libc::SIGKILL), "{failpoint}: {}", stderr(&output));
        let output = killed.train(arguments);
        assert!(output.status.success(), "{failpoint}: {}", stderr(&output));
        for of in [listing, saved, best] {
            assert_eq!(of(&killed), of(&whole), "{failpoint}: {}", stderr(&output));
        }
        assert!(whole.exported() == killed.exported(), "{failpoint}: the weights differ");
    }
}

/// Lists the files and the targets of links in both checkpoint folders.
#[cfg(debug_assertions)]
fn listing(run: &Run) -> Vec<String> {
    let mut folders = vec![run.path().join("checkpoints"), run.path().join("hf")];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(run.path()).unwrap().display().to_string();
            match std::fs::read_link(&path) {
                Ok(target) => found.push(format!("{name} -> {}", target.display())),
                Err(_) if path.is_dir() => folders.push(path),
                Err(_) => found.push(name),
            }
        }
    }
    found.sort();
    found
}

/// Lists the checkpoints that the metrics record.
#[cfg(debug_assertions)]
fn saved(run: &Run) -> Vec<String> {
    let records = run.metrics();
    let folders = records.iter().filter_map(|record| record["saved"].as_str());
    let mut saved: Vec<_> =
        folders.map(|folder| folder.strip_prefix(run.path().to_str().unwrap()).unwrap().to_owned()).collect();
    saved.sort();
    saved
}

/// Returns the step with the best evaluation, which run.json names.
#[cfg(debug_assertions)]
fn best(run: &Run) -> Vec<String> {
    vec![run.report()["metrics"]["best"].to_string()]
}

#[cfg(debug_assertions)]
#[test]
fn a_run_killed_at_any_point_of_its_last_checkpoint_completes_it_at_the_next_start() {
    let parts = ["written", "renamed", "published", "linked", "removing", "pruned", "recorded"];
    check_killed_at(&FOUR_STEPS, &parts.map(|part| format!("checkpoint_{part}:4")).each_ref().map(String::as_str));
}

#[cfg(debug_assertions)]
#[test]
fn a_run_killed_at_any_point_of_its_last_export_completes_it_at_the_next_start() {
    let parts = ["started", "renamed", "published", "linked", "removing", "pruned", "recorded"];
    check_killed_at(&FOUR_STEPS, &parts.map(|part| format!("export_{part}:4")).each_ref().map(String::as_str));
}

#[cfg(debug_assertions)]
#[test]
fn a_run_killed_during_an_asynchronous_checkpoint_completes_it_at_the_next_start() {
    let in_background = [&FOUR_STEPS[..], &["checkpoint.0.async_save=true"]].concat();
    check_killed_at(&in_background, &["checkpoint_renamed:4", "checkpoint_removing:4", "export_renamed:2"]);
}

/// The run ends after step 5, where no checkpoint is due.
#[cfg(debug_assertions)]
#[test]
fn a_run_killed_during_a_checkpoint_before_its_end_completes_it_at_the_next_start() {
    let five_steps = ["train_iters=5", "checkpoint.1.save_end_of_training=false"];
    check_killed_at(&five_steps, &["checkpoint_published:4", "export_removing:4"]);
}

#[cfg(debug_assertions)]
#[test]
fn a_run_killed_during_the_checkpoints_of_an_early_end_completes_them_at_the_next_start() {
    let early = ["train_iters=4", "exit_iteration=3"];
    check_killed_at(&early, &["checkpoint_published:3", "checkpoint_recorded:3", "export_published:3"]);
}

/// Every entry saves the last step of a run without a due checkpoint.
#[cfg(debug_assertions)]
#[test]
fn a_run_killed_between_the_checkpoints_of_its_last_step_completes_them_at_the_next_start() {
    let none_due = ["train_iters=1", "checkpoint.1.save_end_of_training=false"];
    check_killed_at(&none_due, &["checkpoint_published:1", "checkpoint_recorded:1", "export_published:1"]);
}

/// The eval loss falls, so step 2 has the greatest one.
#[test]
fn the_best_checkpoint_of_a_finished_run_stays_when_its_metric_changes() {
    let run = Run::new();
    let start = |greater_is_better: &str| run.train_ok(&[&KEEPS_ONE[..], &FOUR_STEPS, &[greater_is_better]].concat());
    let has_steps = |steps: [usize; 2]| {
        steps.iter().all(|step| run.path().join(format!("checkpoints/epoch_0_global_step_{step}")).is_dir())
    };
    start("greater_is_better=true");
    assert!(has_steps([2, 4]));
    start("greater_is_better=false");
    run.assert_resumed();
    assert!(has_steps([2, 4]), "the start deleted the best checkpoint");
}

#[test]
fn a_resumed_run_has_the_losses_of_an_uninterrupted_one() {
    let whole = Run::new();
    whole.train_ok(&[]);
    let parts = Run::new();
    // Step 7 is a multiple of neither the accumulation nor an epoch's steps.
    parts.train_ok(&["exit_iteration=7"]);
    assert!(parts.export_folder().ends_with("global_step_7"), "an early end exports as the end does");
    parts.train_ok(&[]);
    parts.assert_resumed();
    assert_eq!(parts.losses(), whole.losses());
    assert!(whole.exported() == parts.exported());
}

#[test]
fn a_run_of_half_an_epoch_resumes_to_one_and_a_half_as_a_run_without_interruption() {
    let shares = ["train_iters=null", "eval_interval=null", "evals_per_epoch=2", "scheduler.name=constant"];
    let packed = ["data.pack_samples=true", "micro_batch_size=1"];
    let with = |epochs| [&shares[..], &packed[..], &[epochs]].concat();
    let whole = Run::new();
    whole.train_ok(&with("epochs=1.5"));
    let parts = Run::new();
    parts.train_ok(&with("epochs=0.5"));
    let n_half = parts.losses().len();
    parts.train_ok(&with("epochs=1.5"));
    parts.assert_resumed();
    assert!(n_half > 0 && n_half < whole.losses().len(), "{n_half}");
    assert_eq!(parts.losses(), whole.losses());
    assert!(whole.exported() == parts.exported());
    let evaluated = |run: &Run| -> Vec<u64> {
        run.metrics().iter().filter(|it| it["loss/eval"].is_number()).map(|it| it["iter"].as_u64().unwrap()).collect()
    };
    assert_eq!(evaluated(&parts), evaluated(&whole));
    assert_eq!(evaluated(&whole).len(), 3);
}

#[test]
fn every_checkpoint_and_every_resume_is_recorded_with_its_time() {
    let run = Run::new();
    run.train_ok(&["exit_iteration=7"]);
    run.train_ok(&["exit_iteration=12"]);
    let records = run.metrics();
    let of = |name: &str, time: &str| -> Vec<(u64, String)> {
        let found = records.iter().filter_map(|record| Some((record, record[name].as_str()?)));
        found
            .map(|(record, folder)| {
                assert!(record[time].as_f64().unwrap() > 0.0, "{record}");
                let folder = folder.strip_prefix(run.path().to_str().unwrap()).unwrap();
                (record["iter"].as_u64().unwrap(), folder.to_owned())
            })
            .collect()
    };
    let saves = [
        (5, "checkpoints/epoch_0_"),
        (7, "checkpoints/epoch_0_"),
        (7, "hf/"),
        (10, "checkpoints/epoch_0_"),
        (12, "checkpoints/epoch_0_"),
        (12, "hf/"),
    ];
    let saves: Vec<_> = saves.into_iter().map(|(iter, kind)| (iter, format!("/{kind}global_step_{iter}"))).collect();
    assert_eq!(of("saved", "save_time"), saves);
    assert_eq!(of("resumed_from", "resume_time"), [(7, "/checkpoints/epoch_0_global_step_7".to_owned())]);
}

#[test]
fn an_adapter_with_dropout_in_bf16_on_packed_rows_resumes_bit_for_bit() {
    let lora = "model.peft_config={r: 4, lora_alpha: 8, lora_dropout: 0.2, target_modules: all-linear}";
    let keys = [lora, "model.dtype=bf16", "data.pack_samples=true", "micro_batch_size=1", "train_iters=10"];
    let whole = Run::new();
    whole.train_ok(&keys);
    let parts = Run::new();
    parts.train_ok(&[&keys[..], &["exit_iteration=3"]].concat());
    parts.train_ok(&keys);
    parts.assert_resumed();
    assert_eq!(parts.losses(), whole.losses());
    assert!(whole.exported() == parts.exported());
    let folder = AdapterFolder::open(&parts.export_folder()).unwrap();
    assert_eq!(folder.config.to_json()["lora_dropout"], 0.2);
    assert!(parts.export_folder().join("tokenizer.json").is_file());

    // The first step has the loss of the trained adapter, not that of a new one.
    let next = Run::new();
    let from = format!("model.adapter_name_or_path={}", parts.export_folder().display());
    next.train_ok(&[&from, "model.dtype=bf16", "train_iters=1"]);
    let fresh = Run::new();
    fresh.train_ok(&[lora, "model.dtype=bf16", "train_iters=1"]);
    assert!(next.losses()[0] < fresh.losses()[0] - 0.1, "{:?} {:?}", next.losses(), fresh.losses());
}

#[test]
fn a_run_with_stochastically_rounded_masters_resumes_bit_for_bit() {
    const NEAREST: [&str; 3] =
        ["model.dtype=bf16", "deepspeed.bf16.bf16_master_weights_and_grads=true", "train_iters=10"];
    let keys = [&NEAREST[..], &["optimizer.bf16_stochastic_round=true"]].concat();
    let [whole, parts, nearest] = [Run::new(), Run::new(), Run::new()];
    whole.train_ok(&keys);
    parts.train_ok(&[&keys[..], &["exit_iteration=3"]].concat());
    parts.train_ok(&keys);
    parts.assert_resumed();
    assert_eq!(parts.losses(), whole.losses());
    assert!(whole.exported() == parts.exported());
    nearest.train_ok(&NEAREST);
    let losses = [&nearest, &whole].map(Run::losses);
    assert_eq!(losses[0][0], losses[1][0], "the first update follows the first loss");
    assert_ne!(losses[0][1..], losses[1][1..], "rounding has no effect");
}

#[test]
fn a_template_that_prints_the_time_prints_the_start_of_the_run() {
    let run = Run::new();
    run.write("clock.jinja", "{{ strftime_now('%H:%M:%S') }}{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}");
    let key = format!("tokenizer.chat_template={}", run.path().join("clock.jinja").display());
    run.train_ok(&[&key, "exit_iteration=2"]);
    let began = shift_saved_date(&run, -3_600_000);
    // The text would be the same if the template printed the time of this start.
    let output = run.train(&[&key, "exit_iteration=4"]);
    assert!(stderr(&output).contains("the data changed"), "{}", stderr(&output));
    assert_eq!(shift_saved_date(&run, 3_600_000), began - 3_600_000);
    run.train_ok(&[&key, "exit_iteration=4"]);
    run.assert_resumed();
}

/// Adds milliseconds to the run's start in the checkpoint of step 2, with its hash. Returns the start before the change.
fn shift_saved_date(run: &Run, milliseconds: i64) -> i64 {
    let folder = run.path().join("checkpoints/epoch_0_global_step_2");
    let rewrite = |name: &str, from: &str, to: &str| {
        let text = std::fs::read_to_string(folder.join(name)).unwrap();
        assert!(text.contains(from), "no {from} in:\n{text}");
        let changed = text.replace(from, to);
        std::fs::write(folder.join(name), &changed).unwrap();
        [text, changed].map(|text| blake3::hash(text.as_bytes()).to_string())
    };
    let state: serde_json::Value = serde_json::from_slice(&std::fs::read(folder.join("state.json")).unwrap()).unwrap();
    let date = state["date"].as_i64().unwrap();
    let field = |date: i64| format!("\"date\": {date}");
    let [old_hash, new_hash] = rewrite("state.json", &field(date), &field(date + milliseconds));
    rewrite("manifest.json", &old_hash, &new_hash);
    date
}

#[test]
fn micro_batches_change_neither_loss_nor_gradient() {
    let first_step = |keys: &[&str]| {
        let run = Run::new();
        let rows = std::fs::read_to_string(run.path().join("train.jsonl")).unwrap();
        // The answers have four lengths: a mean of the micro-batches' means would differ.
        run.write("train.jsonl", &rows.lines().take(4).collect::<Vec<_>>().join("\n"));
        run.train_ok(&[&["train_iters=1", "data.order=sequential", "data.max_length=256"], keys].concat());
        let step = run.metrics().swap_remove(0);
        ["loss", "grad_norm", "n_targets"].map(|name| step[name].as_f64().unwrap())
    };
    let whole = first_step(&["micro_batch_size=4", "gradient_accumulation_steps=1"]);
    let splits: [&[&str]; 4] = [
        &["micro_batch_size=1", "gradient_accumulation_steps=4"],
        &["micro_batch_size=2", "gradient_accumulation_steps=2"],
        &["micro_batch_size=2", "gradient_accumulation_steps=2", "data.pad_to=max_length"],
        &["micro_batch_size=1", "gradient_accumulation_steps=1", "data.pack_samples=true"],
    ];
    for keys in splits {
        let split = first_step(keys);
        for (a, b) in whole.iter().zip(split) {
            assert!((a - b).abs() <= 1e-5 * a.abs(), "{keys:?}: {whole:?} {split:?}");
        }
    }
}

#[test]
fn a_run_with_label_smoothing_resumes_and_logs_another_factor() {
    const SMOOTHED: [&str; 2] = ["train_iters=12", "label_smoothing_factor=0.1"];
    let [plain, whole, parts] = [Run::new(), Run::new(), Run::new()];
    plain.train_ok(&["train_iters=12"]);
    whole.train_ok(&SMOOTHED);
    // The mean loss over the vocabulary grows while that of the targets falls.
    let [of_plain, of_whole] = [&plain, &whole].map(|run| *run.losses().last().unwrap());
    assert!(of_whole > 1.01 * of_plain, "{of_whole} {of_plain}");

    parts.train_ok(&[&SMOOTHED[..], &["exit_iteration=7"]].concat());
    parts.train_ok(&SMOOTHED);
    parts.assert_resumed();
    assert_eq!(parts.losses(), whole.losses());
    assert!(whole.exported() == parts.exported());

    let other = Run::new();
    other.train_ok(&[&SMOOTHED[..], &["exit_iteration=3"]].concat());
    let log = stderr(&other.train(&["train_iters=12", "label_smoothing_factor=0.2", "exit_iteration=4"]));
    let change = "changed since this checkpoint: label_smoothing_factor: 0.1 in the checkpoint, 0.2 now";
    assert!(log.contains(change), "{log}");
}

/// The first evaluation is before the first step.
#[test]
fn the_evaluation_loss_is_not_smoothed() {
    let eval_loss = |factor: &str| {
        let run = Run::new();
        run.train_ok(&["eval_on_start=true", "train_iters=1", &format!("label_smoothing_factor={factor}")]);
        run.metrics().iter().find_map(|record| record["loss/eval"].as_f64()).unwrap()
    };
    assert_eq!(eval_loss("0.3"), eval_loss("0"));
}

#[test]
fn settings_that_changed_since_the_checkpoint_are_logged() {
    let run = Run::new();
    run.train_ok(&["exit_iteration=3"]);
    let output = run.train(&["optimizer.learning_rate=5e-3", "exit_iteration=4"]);
    let text = stderr(&output);
    assert!(
        text.contains("changed since this checkpoint: optimizer.learning_rate: 0.01 in the checkpoint, 0.005 now"),
        "{text}"
    );
}

#[test]
fn checkpoints_of_an_earlier_run_are_not_resumed() {
    let run = Run::new();
    run.train_ok(&[]);
    let old = run.exported();
    let keys = ["seed=8", "checkpoint.0.auto_resume=false"];
    run.train_ok(&[&keys[..], &["exit_iteration=7"]].concat());
    assert!(run.report()["resumed_from"].is_null());
    run.train_ok(&["seed=8"]);
    assert_eq!(run.report()["ledger"]["seen"]["steps"], 24);
    assert!(run.report()["resumed_from"].as_str().unwrap().ends_with("global_step_7"), "{}", run.report());
    assert!(run.exported() != old, "the export is the old run's");
}

#[test]
fn a_checkpoint_and_an_export_may_share_a_folder() {
    let run = Run::new();
    let folder = run.path().join("hf");
    run.train_ok(&[
        "train_iters=2",
        "checkpoint.0.save_end_of_training=true",
        &format!("checkpoint.0.output_dir={}", folder.display()),
    ]);
    assert!(folder.join("global_step_2/model.safetensors").exists());
    assert!(std::fs::read_dir(&folder).unwrap().count() >= 4, "a checkpoint, an export, a lock and a link");
}

#[test]
fn a_leftover_kill_switch_is_named() {
    let run = Run::new();
    run.write("stop", "");
    let key = format!("kill_switch_path={}", run.path().join("stop").display());
    let output = run.train(&[&key]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("remove the file"), "{}", stderr(&output));
}

#[test]
fn the_data_are_described_and_every_token_is_counted() {
    let run = Run::new();
    let output = run.train(&["train_iters=3"]);
    assert!(stderr(&output).contains("reads as"), "{}", stderr(&output));
    let report = run.report();
    assert!(report["notes"].as_array().unwrap().iter().any(|note| note.as_str().unwrap().contains("reads as")));
    let tokens: u64 = run.metrics().iter().filter_map(|record| record["tokens"].as_u64()).sum();
    assert_eq!(report["ledger"]["seen"]["read"]["tokens"].as_u64(), Some(tokens), "{}", report["ledger"]);
}

#[test]
fn the_recipes_chat_template_is_exported_with_the_weights() {
    let run = Run::new();
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if \
                    add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    run.write("own.jinja", template);
    let key = format!("tokenizer.chat_template={}", run.path().join("own.jinja").display());
    run.train_ok(&[&key, "train_iters=1"]);
    assert_eq!(std::fs::read_to_string(run.export_folder().join("chat_template.jinja")).unwrap(), template);
}

/// The tokenizer's EOS is another token than the end of turn, as in base models.
#[test]
fn a_chat_template_by_name_is_exported_with_its_end_of_turn() {
    let run = Run::new();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../recipes/quickstart/tokenizer");
    let folder = run.path().join("base");
    std::fs::create_dir(&folder).unwrap();
    std::fs::copy(format!("{source}/tokenizer.json"), folder.join("tokenizer.json")).unwrap();
    run.write("base/tokenizer_config.json", r#"{"eos_token": "<|endoftext|>"}"#);
    let tokenizer = format!("tokenizer.name_or_path={}", folder.display());
    let arguments = [tokenizer.as_str(), "tokenizer.chat_template=chatml", "train_iters=1"];
    run.train_ok(&arguments);
    let exported = |name: &str| std::fs::read_to_string(run.export_folder().join(name)).unwrap();
    assert_eq!(exported("chat_template.jinja"), BuiltInTemplate::find("chatml").unwrap().source);
    let generation: serde_json::Value = serde_json::from_str(&exported("generation_config.json")).unwrap();
    let tokenizer_of_export = Tokenizer::from_directory(run.export_folder()).unwrap();
    let id = |token: &str| tokenizer_of_export.token_to_id(token).unwrap();
    assert_eq!(generation["eos_token_id"], serde_json::json!([id("<|endoftext|>"), id("<|im_end|>")]));
    let refused = run.train(&[tokenizer.as_str(), "tokenizer.chat_template=llama3"]);
    assert_eq!(refused.status.code(), Some(3), "{}", stderr(&refused));
    for part in ["no token <|start_header_id|>", "choose a template that fits this tokenizer (chatml,"] {
        assert!(stderr(&refused).contains(part), "{}", stderr(&refused));
    }
}

#[cfg(debug_assertions)]
#[test]
fn a_termination_signal_saves_and_exits_with_the_restart_code() {
    let streamed = ["data.streaming=true", "data.buffer_size=7", "train_iters=24"];
    for arguments in [&[][..], &["data.dl_num_workers=2"], &streamed] {
        let whole = Run::new();
        whole.train_ok(arguments);
        let stopped = Run::new();
        let mut command = stopped.command("train", arguments);
        let output = command.env("CANDLEWICK_TEST_TERMINATE_AT", "step_computed:2").output().unwrap();
        assert_eq!(output.status.code(), Some(75), "{}", stderr(&output));
        stopped.train_ok(arguments);
        stopped.assert_resumed();
        assert!(whole.exported() == stopped.exported(), "{arguments:?}");
    }
}

#[test]
fn eval_on_start_evaluates_before_the_first_step_only() {
    let run = Run::new();
    run.train_ok(&["eval_on_start=true", "exit_iteration=5"]);
    run.train_ok(&["eval_on_start=true"]);
    run.assert_resumed();
    let evals: Vec<_> =
        run.metrics().iter().filter(|it| !it["loss/eval"].is_null()).map(|it| it["iter"].clone()).collect();
    assert_eq!(evals, [0, 12, 24]);
    assert_eq!(run.metrics()[0]["iter"], 0);
}

#[test]
fn a_run_that_ended_before_its_export_exports_at_the_next_start() {
    let run = Run::new();
    let at_the_end = "checkpoint.0.save_end_of_training=true";
    run.train_ok(&[at_the_end]);
    let exported = run.exported();
    std::fs::remove_dir_all(run.path().join("hf")).unwrap();
    run.train_ok(&[at_the_end]);
    run.assert_resumed();
    assert!(run.exported() == exported);
}
