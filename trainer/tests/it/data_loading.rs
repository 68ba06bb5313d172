//! Data loader workers, streams, tokenized rows and repeated samples, in whole runs.

use serde_json::{Value, json};

use crate::support::{Run, stderr};

/// Trains with these arguments and returns the losses.
fn losses(run: &Run, arguments: &[&str]) -> Vec<f64> {
    run.train_ok(arguments);
    run.losses()
}

#[test]
fn batches_do_not_depend_on_the_number_of_workers_and_a_resume_is_exact() {
    const KEYS: [&str; 3] = ["train_iters=12", "data.pack_samples=true", "micro_batch_size=1"];
    let with = |n: &'static str, more: &'static str| [&KEYS[..], &[n, more]].concat();
    let alone = Run::new();
    let want = losses(&alone, &with("data.dl_num_workers=0", "seed=7"));
    assert_eq!(want.len(), 12);
    let parts = Run::new();
    // The queue then holds four batches that the stopped process does not train on.
    parts.train_ok(&with("data.dl_num_workers=2", "exit_iteration=5"));
    parts.train_ok(&with("data.dl_num_workers=1", "seed=7"));
    parts.assert_resumed();
    assert_eq!(parts.losses(), want);
    assert!(parts.exported() == alone.exported(), "the weights differ");
}

#[test]
fn a_stream_resumes_exactly_and_does_not_depend_on_the_workers() {
    const KEYS: [&str; 4] =
        ["data.streaming=true", "train_iters=45", "eval_interval=0", "checkpoint.0.save_every_n_steps=0"];
    let of_size = |size: &'static str, more: &[&'static str]| [&KEYS[..], &[size], more].concat();
    let with = |more: &[&'static str]| of_size("data.buffer_size=7", more);
    // 80 rows of 4 a step: the run has more than two epochs.
    let whole = Run::new();
    let want = losses(&whole, &with(&["data.dl_num_workers=0"]));
    assert_eq!(want.len(), 45);
    let parts = Run::new();
    for exit in ["exit_iteration=3", "exit_iteration=20", "exit_iteration=31"] {
        parts.train_ok(&with(&[exit, "data.dl_num_workers=2"]));
    }
    parts.train_ok(&with(&[]));
    parts.assert_resumed();
    assert_eq!(parts.losses(), want);
    assert!(parts.exported() == whole.exported(), "the weights differ");
    let epochs: Vec<u64> =
        whole.metrics().iter().filter(|it| it["loss"].is_number()).map(|it| it["epoch"].as_u64().unwrap()).collect();
    assert_eq!((epochs[19], epochs[20], epochs[44]), (0, 1, 2));
    // Each epoch is evaluated, and so is the end.
    assert_eq!(whole.metrics().iter().filter(|it| it["loss/eval"].is_number()).count(), 3);
    // Another size of the chunks is another order.
    let output = parts.train(&of_size("data.buffer_size=8", &[]));
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    assert!(stderr(&output).contains("buffer_size was 7, now 8"), "{}", stderr(&output));
}

/// Returns the token ids of each sequence of some steps.
fn sequences(run: &Run, n_steps: &str, arguments: &[&str]) -> Vec<Vec<u64>> {
    let mut command = run.command("preprocess", arguments);
    let output = command.args(["--steps", n_steps, "--output-format", "json"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    let steps = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let batches = steps.flat_map(|step| step["micro_batches"].as_array().unwrap().clone());
    let split = |batch: Value| {
        let numbers = |key: &str| -> Vec<u64> {
            batch[key].as_array().unwrap().iter().map(|number| number.as_u64().unwrap()).collect()
        };
        let (ids, ends) = (numbers("ids"), numbers("cu_seqlens"));
        ends.windows(2).map(|pair| ids[pair[0] as usize..pair[1] as usize].to_vec()).collect::<Vec<_>>()
    };
    batches.flat_map(split).collect()
}

#[test]
fn an_epoch_of_a_stream_has_every_sample_once_in_an_order_of_its_own() {
    let run = Run::new();
    let mut want = sequences(&run, "20", &["data.order=sequential", "train_iters=20"]);
    let stream = ["data.streaming=true", "data.buffer_size=9", "train_iters=40"];
    let streamed = sequences(&run, "40", &[&stream[..], &["data.dl_num_workers=2"]].concat());
    let (first, second) = streamed.split_at(want.len());
    assert_ne!(first, second);
    let sequential = sequences(&run, "20", &[&stream[..], &["data.order=sequential"]].concat());
    assert_eq!(sequential, want);
    let sorted = |sequences: &[Vec<u64>]| {
        let mut sequences = sequences.to_vec();
        sequences.sort();
        sequences
    };
    want.sort();
    assert_eq!((sorted(first), sorted(second)), (want.clone(), want));
    assert!(!run.path().join("cache").read_dir().unwrap().any(|entry| {
        // Only the run of tokenized data has filled the cache.
        entry.unwrap().file_name().to_string_lossy().contains("stream")
    }));
}

#[test]
fn tokenized_rows_train_as_the_rows_they_were_made_from() {
    let run = Run::new();
    let output = run
        .command("preprocess", &["data.order=sequential"])
        .args(["--steps", "20", "--output-format", "json"])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let mut rows = String::new();
    for step in text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()) {
        for batch in step["micro_batches"].as_array().unwrap() {
            let list = |key: &str| batch[key].as_array().unwrap().clone();
            let (ids, targets, ends) = (list("ids"), list("targets"), list("cu_seqlens"));
            for pair in ends.windows(2) {
                let (start, end) = (pair[0].as_u64().unwrap() as usize, pair[1].as_u64().unwrap() as usize);
                // Targets are shifted by one token, labels are not.
                let labels: Vec<Value> =
                    std::iter::once(json!(-100)).chain(targets[start..end - 1].iter().cloned()).collect();
                let row =
                    json!({"input_ids": ids[start..end], "labels": labels, "attention_mask": vec![1; end - start]});
                rows += &format!("{row}\n");
            }
        }
    }
    run.write("tokens.jsonl", &rows);
    let tokens = format!("data.sources=[{{name_or_path: {}/tokens.jsonl, process: false}}]", run.path().display());
    let keys = ["train_iters=8", "checkpoint=none"];
    let want = losses(&Run::new(), &keys);
    assert_eq!(losses(&run, &[&keys[..], &[&tokens]].concat()), want);

    run.write("tokens.jsonl", "{\"input_ids\": [5, 6, 7], \"labels\": [-100, 7, -100]}\n");
    let output = run.train(&[&tokens, "checkpoint=none"]);
    assert!(
        stderr(&output).contains("column `labels`, item 1: the label 7 belongs to the token 6"),
        "{}",
        stderr(&output)
    );
    run.write("tokens.jsonl", "{\"input_ids\": [5, 6, 7], \"labels\": [-100, 6, 7]}\n");
    let output = run.train(&[&tokens, "checkpoint=none"]);
    for want in ["find an end-of-turn target", "tokens.jsonl:1", "(process: false)", "`data.train_on_eos: none`"] {
        assert!(stderr(&output).contains(want), "{}", stderr(&output));
    }
    let output =
        run.train(&[&tokens, "checkpoint=none", "data.train_on_eos=none", "micro_batch_size=1", "train_iters=1"]);
    assert!(output.status.success(), "{}", stderr(&output));
    run.write("tokens.jsonl", "{\"input_ids\": [5, 6, 70000]}\n");
    let output = run.train(&[&tokens, "checkpoint=none", "data.mask_inputs=false"]);
    assert!(stderr(&output).contains("tokens.jsonl:1: use token id 70000"), "{}", stderr(&output));
    run.write("tokens.jsonl", "{\"input_ids\": [5, 6, 7]}\n");
    let output = run.train(&[&tokens, "checkpoint=none"]);
    assert!(stderr(&output).contains("the tokenized row has no column `labels`"), "{}", stderr(&output));
}

#[test]
fn samples_are_repeated_until_they_fill_a_row() {
    let run = Run::new();
    let row = json!({"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]});
    let other =
        json!({"messages": [{"role": "user", "content": "three"}, {"role": "assistant", "content": "four and five"}]});
    run.write("train.jsonl", &format!("{row}\n{other}\n"));
    let keys = [
        "data.pack_samples=true",
        "micro_batch_size=1",
        "gradient_accumulation_steps=1",
        "train_iters=1",
        "data.order=sequential",
        "data.max_length=250",
    ];
    let once = sequences(&run, "1", &keys);
    assert_eq!(once.len(), 2);
    let total: usize = once.iter().map(Vec::len).sum();
    let repeated = sequences(&run, "1", &[&keys[..], &["data.repeat_to_pack_max_length=true"]].concat());
    let n_repeats = 250 / total;
    let rest = if 250 - n_repeats * total >= once[0].len() { 1 } else { 0 };
    assert!(n_repeats > 1);
    assert_eq!(repeated.len(), 2 * n_repeats + rest);
    assert!(repeated.chunks(2).all(|pair| pair[0] == once[0]), "{repeated:?}");
}

#[test]
fn tokenize_kwargs_cut_each_text() {
    let run = Run::new();
    let texts: String = (0..40)
        .map(|i| json!({"text": format!("{i} is a number. {}", "And so on. ".repeat(i))}).to_string() + "\n")
        .collect();
    run.write("train.jsonl", &texts);
    let keys =
        ["type=causal", "data.pack_samples=false", "data.eval_sources=[]", "eval_interval=0", "data.order=sequential"];
    let whole = sequences(&run, "10", &keys);
    let cut =
        sequences(&run, "10", &[&keys[..], &["tokenizer.tokenize_kwargs={truncation: true, max_length: 6}"]].concat());
    let longest = |sequences: &[Vec<u64>]| sequences.iter().map(Vec::len).max().unwrap();
    // EOS follows the six tokens.
    assert!(longest(&whole) > 20);
    assert_eq!(longest(&cut), 7);
    assert_eq!(cut[3][..6], whole[3][..6]);
    assert_eq!(cut[3][6], *whole[3].last().unwrap());
}
