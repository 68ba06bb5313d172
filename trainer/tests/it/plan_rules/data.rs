//! Data sources, splits and rows.

use trainer::data::{
    Horizon, MaskingStrategy, Mixture, Packing, PackingStrategy, Padding, Sampling, StoppingStrategy, TrainOnEos,
    TrainedRole, Truncation,
};

use super::{notes, plan, refused};

#[test]
fn a_split_sums_to_one_and_excludes_evaluation_sources() {
    refused(
        &["data.train_eval_split=[0.9, 0.2]", "eval_interval=1"],
        &["expected two fractions that sum to 1, found [0.9, 0.2]"],
    );
    refused(&["data.train_eval_split=[0, 1]", "eval_interval=1"], &["expected two fractions"]);
    refused(
        &["data.train_eval_split=[0.9, 0.1]", "data.eval_sources=[b]", "eval_interval=1"],
        &["data.train_eval_split and data.eval_sources exclude each other"],
    );
    plan(&["data.train_eval_split=[1.0, 0.0]", "data.eval_sources=[b]", "eval_interval=1"]);
}

#[test]
fn max_length_defaults_to_the_models() {
    assert_eq!(plan(&[]).data.max_length, 2048);
    assert_eq!(plan(&["data.max_length=1Ki"]).data.max_length, 1024);
    let long = plan(&["data.max_length=4Ki"]);
    assert_eq!(long.data.max_length, 4096);
    assert!(long.notes.iter().any(|note| {
        let yarn = "rope_scaling: {rope_type: yarn, factor: 2, original_max_position_embeddings: 2048}";
        note.contains("4096 exceeds the model's max_position_embeddings, 2048") && note.contains(yarn)
    }));
    refused(&["data.max_length=1"], &["expected at least 2"]);
    assert_eq!(plan(&["model.hf_config_kwargs={max_position_embeddings: 4096}"]).data.max_length, 4096);
}

#[test]
fn packing_follows_the_type() {
    assert_eq!(plan(&[]).data.packing, Packing::Off);
    assert_eq!(plan(&["data.pack_samples=true"]).data.packing, Packing::Fit(PackingStrategy::BestFit));
    let sorted = ["data.pack_samples=true", "data.packing_strategy=bfd"];
    assert_eq!(plan(&sorted).data.packing, Packing::Fit(PackingStrategy::Bfd));
    for unpacked in ["data.pack_samples=false", "type=causal"] {
        notes(&[unpacked, "data.packing_strategy=bfd"], &["data.packing_strategy has no effect"]);
    }
    assert_eq!(plan(&["data.pack_samples=true", "data.always_max_length=true"]).data.packing, Packing::Exact);
    assert_eq!(plan(&["type=causal"]).data.packing, Packing::Exact);
    assert_eq!(plan(&["type=causal", "data.pack_samples=false"]).data.packing, Packing::Off);
    assert_eq!(plan(&["data.pack_samples=true", "micro_batch_size=2"]).data.micro_batch_size, 2);
    refused(&["data.always_max_length=true"], &["needs data.pack_samples: true"]);
    refused(&["data.fuse_positions_prob=0.5"], &["needs data.pack_samples: true"]);
    refused(&["data.pack_samples=true", "data.fuse_positions_prob=1.5"], &["expected 0 to 1, found 1.5"]);
}

#[test]
fn truncation_is_an_error_by_default() {
    assert_eq!(plan(&[]).data.truncation, Truncation::Error);
    assert_eq!(plan(&["data.filter_samples=true"]).data.truncation, Truncation::Drop);
    assert_eq!(plan(&["data.filter_samples=false"]).data.truncation, Truncation::Error);
    assert_eq!(plan(&["data.truncation=truncate"]).data.truncation, Truncation::Truncate);
    refused(
        &["data.truncation=truncate", "data.filter_samples=true"],
        &["data.filter_samples contradicts data.truncation"],
    );
    assert_eq!(plan(&["type=causal"]).data.truncation, Truncation::Split);
    assert_eq!(plan(&["type=causal", "data.pack_samples=false"]).data.truncation, Truncation::Split);
    assert_eq!(
        plan(&["type=causal", "data.pack_samples=false", "data.truncation=error"]).data.truncation,
        Truncation::Error
    );
    refused(&["type=causal", "data.truncation=drop"], &["packing into rows of exactly max_length"]);
}

#[test]
fn padding_has_three_forms() {
    assert_eq!(plan(&[]).data.padding, Padding::Nothing);
    assert_eq!(plan(&["data.pad_to=div_length"]).data.padding, Padding::Multiple(256));
    assert_eq!(plan(&["data.div_length=64"]).data.padding, Padding::Multiple(64));
    assert_eq!(plan(&["data.pad_to=max_length"]).data.padding, Padding::MaxLength);
    refused(&["data.div_length=0"], &["data.div_length: expected at least 1"]);
    refused(&["data.pad_to=none", "data.div_length=8"], &["contradicts data.pad_to: none"]);
    refused(
        &["data.pad_to=max_length", "data.max_length=1000", "data.div_length=256"],
        &["not a multiple of div_length 256", "use max_length 768 or 1024"],
    );
}

#[test]
fn iterations_replace_epochs() {
    assert_eq!(plan(&[]).data.horizon, Horizon::Epochs(1.0));
    assert_eq!(plan(&["epochs=3"]).data.horizon, Horizon::Epochs(3.0));
    assert_eq!(plan(&["epochs=0.5"]).data.horizon, Horizon::Epochs(0.5));
    refused(&["epochs=-0.5"], &["epochs: expected a number above 0"]);
    assert_eq!(plan(&["epochs=3", "train_iters=10"]).data.horizon, Horizon::Steps(10));
    assert_eq!(plan(&["epochs=3", "train_tokens=10K"]).data.horizon, Horizon::Tokens(10_000));
    assert_eq!(plan(&["train_tokens=0", "train_iters=5"]).data.horizon, Horizon::Steps(5));
    refused(&["train_tokens=10", "train_iters=5"], &["train_tokens and train_iters exclude each other"]);
    refused(&["scheduler={warmup_tokens: 10, warmup_steps: 1}"], &["warmup_tokens excludes scheduler.warmup_steps"]);
    refused(&["scheduler={name: constant, warmup_tokens: 10}"], &["constant has no warm-up"]);
    refused(&["scheduler={num_decay_tokens: 10}"], &["num_decay_tokens belongs to the warmup_stable_decay schedule"]);
    refused(&["epochs=0"], &["trains nothing"]);
    refused(&["micro_batch_size=0"], &["micro_batch_size: expected at least 1, found 0"]);
    refused(&["gradient_accumulation_steps=0"], &["expected at least 1"]);
}

#[test]
fn a_chat_template_is_a_name_a_path_or_a_template() {
    let names =
        "neither a built-in template (chatml, qwen2.5, qwen3, llama3, mistral, gemma, llama2, zephyr, vicuna, alpaca)";
    refused(&["tokenizer.chat_template=missing.jinja"], &["`missing.jinja` is", names, "nor an existing Jinja file"]);
    refused(&["tokenizer.chat_template=chatlm"], &["did you mean `chatml`?"]);
    assert!(plan(&["tokenizer.chat_template=chatml"]).tokenizer.chat_template.is_some());
    assert!(plan(&["tokenizer.chat_template='{{ messages }}'"]).tokenizer.chat_template.is_some());
}

#[test]
fn sources_are_checked_one_by_one() {
    refused(&["data.sources.0={split: a}"], &["the key `data.sources.0.name_or_path` is missing"]);
    refused(&["data.sources.0.type=huggingface_causal"], &["this source type does not support `type: sft`"]);
    refused(
        &["type=causal", "data.sources.0.type=huggingface_instruct"],
        &["this source type does not support `type: causal`"],
    );
    refused(&["type=causal", "data.sources.0.role_mapping={user: a}"], &["plain text has no roles"]);
    refused(&["data.sources.0.role_mapping={user: a.b}"], &["expected a column, or array.field.value, found `a.b`"]);
    refused(&["data.sources.0.sample_ratio=0.5", "data.sources.0.sample_count=3"], &["exclude each other"]);
    refused(&["data.sources.0.sample_ratio=150%"], &["expected above 0 and at most 1, found 1.5"]);
    refused(&["data.sources.0.sample_count=0"], &["expected at least 1"]);
    refused(&["data.sources.0.format=jsonl"], &["unknown value \"jsonl\"", "values: messages"]);
    refused(&["data.type=causal"], &["data.type differs from the run's type"]);
    let plan = plan(&["data.sources.0.sample_count=10", "data.sources.0.role_mapping={user: q, assistant: a}"]);
    assert_eq!(plan.data.sources[0].sampling, Sampling::Count(10));
    assert_eq!(plan.data.sources[0].role_mapping[1], ("assistant".into(), "a".into()));
}

#[test]
fn the_keyword_arguments_of_load_dataset_are_read() {
    let given = "data.sources.0.kwargs={name: main, data_files: {train: [a.json, b.json], test: c.json}, field: rows, \
                 sample_by: document, sep: ';', trust_remote_code: true}";
    let source = plan(&[given]).data.sources.remove(0);
    let files = [("train", "a.json"), ("train", "b.json"), ("test", "c.json")];
    assert_eq!(source.data_files, files.map(|(split, file)| (Some(split.to_owned()), file.to_owned())));
    assert_eq!((source.subset.as_deref(), source.field.as_deref()), (Some("main"), Some("rows")));
    assert_eq!((source.sample_by.as_deref(), source.delimiter), (Some("document"), Some(b';')));
    let source = plan(&["data.sources.0.kwargs={data_files: 'x/*.json'}"]).data.sources.remove(0);
    assert_eq!(source.data_files, [(None, "x/*.json".to_owned())]);
    for (argument, want) in [
        ("{data_files: 3}", "kwargs.data_files: expected a path or pattern, a list of them"),
        ("{data_files: []}", "a map from splits to them, found []"),
        ("{sample_by: word}", "kwargs.sample_by: expected line, paragraph or document"),
        ("{sep: '||'}", "kwargs.sep: expected one ASCII character"),
        ("{name: 3}", "kwargs.name: expected the name of a configuration"),
    ] {
        refused(&[&format!("data.sources.0.kwargs={argument}")], &[want]);
    }
}

#[test]
fn one_source_needs_no_list() {
    let names = |overrides: &[&str]| -> Vec<String> {
        plan(overrides).data.sources.into_iter().map(|source| source.name_or_path).collect()
    };
    assert_eq!(names(&["data.sources=chats.jsonl"]), ["chats.jsonl"]);
    assert_eq!(names(&["data.sources={name_or_path: chats.jsonl, format: messages}"]), ["chats.jsonl"]);
    assert_eq!(names(&["data.sources=[a.jsonl, b.jsonl]"]), ["a.jsonl", "b.jsonl"]);
    let eval = plan(&["data.eval_sources=b.jsonl", "eval_interval=1"]).data.eval_sources;
    assert_eq!(eval[0].name_or_path, "b.jsonl");
    refused(&["data.sources=3"], &["expected a list of sources, or one source"]);
    refused(&["data.sources={nmae: a}"], &["nmae"]);
}

#[test]
fn special_tokens_of_texts_follow_the_tokenizer_unless_given() {
    let specials = |overrides: &[&str]| {
        let data = plan(overrides).data;
        (data.add_bos_token, data.add_eos_token)
    };
    assert_eq!(specials(&["type=causal"]), (None, true));
    assert_eq!(specials(&["type=causal", "data.add_bos_token=true", "data.add_eos_token=false"]), (Some(true), false));
}

#[test]
fn the_mask_follows_either_key() {
    use MaskingStrategy::{TrainOnAll, TrainOnAssistant, TrainOnLast};
    let strategy = |keys: &[&str]| plan(keys).data.masking_strategy;
    assert_eq!(strategy(&[]), TrainOnAssistant);
    assert_eq!(strategy(&["data.mask_inputs=false"]), TrainOnAll);
    assert_eq!(strategy(&["data.masking_strategy=train_on_last"]), TrainOnLast);
    assert_eq!(strategy(&["data.masking_strategy=train_on_last", "data.mask_inputs=true"]), TrainOnLast);
    refused(
        &["data.masking_strategy=train_on_last", "data.mask_inputs=false"],
        &["data.mask_inputs: false contradicts data.masking_strategy"],
    );
    refused(&["data.masking_strategy=train_on_lats"], &["train_on_last"]);
}

#[test]
fn roles_to_train_are_known_roles() {
    let roles = |keys: &[&str]| plan(keys).data.roles_to_train;
    assert_eq!(roles(&[]), [TrainedRole::Assistant]);
    assert_eq!(roles(&["data.roles_to_train=[gpt, human, user]"]), [TrainedRole::User, TrainedRole::Assistant]);
    refused(&["data.roles_to_train=[]"], &["data.roles_to_train: expected at least one role, found none"]);
    refused(&["data.roles_to_train=[usr]"], &["usr", "user"]);
    refused(
        &["data.roles_to_train=[user]", "data.mask_inputs=false"],
        &["data.roles_to_train has no effect: the loss covers every token"],
    );
    assert_eq!(plan(&[]).data.train_on_eos, TrainOnEos::Turn);
    assert_eq!(plan(&["data.train_on_eos=none"]).data.train_on_eos, TrainOnEos::None);
}

const TWO: &str = "data.sources=[{name_or_path: a, weight: 3}, {name_or_path: b, weight: 1}]";

#[test]
fn weights_are_relative_and_interleave() {
    let mixture = |keys: &[&str]| plan(keys).data.mixture;
    let weights = |stopping_strategy| Mixture::Interleave { probabilities: vec![0.75, 0.25], stopping_strategy };
    assert_eq!(mixture(&["data.sources=[a, b]"]), Mixture::Concatenate);
    assert_eq!(mixture(&[TWO]), weights(StoppingStrategy::FirstExhausted));
    assert_eq!(mixture(&[TWO, "data.stopping_strategy=all_exhausted"]), weights(StoppingStrategy::AllExhausted));
    let in_turn = Mixture::Interleave { probabilities: vec![], stopping_strategy: StoppingStrategy::AllExhausted };
    assert_eq!(mixture(&["data.sources=[a, b]", "data.stopping_strategy=all_exhausted"]), in_turn);
    assert_eq!(mixture(&["data.sources=[a, {name_or_path: b, repeat: 2.5}]"]), Mixture::Repeat(vec![1.0, 2.5]));
}

#[test]
fn contradictions_of_a_mixture_are_refused() {
    refused(
        &["data.sources=[a, {name_or_path: b, weight: 1}]"],
        &["data.sources.1.weight: not every source has a weight", "for every source, or for none"],
    );
    refused(
        &["data.sources=[{name_or_path: a, weight: 0}, {name_or_path: b, weight: 1}]"],
        &["data.sources.0.weight: expected a number above 0, found 0"],
    );
    refused(&[TWO, "data.sources.0.repeat=2"], &["data.sources.0.repeat contradicts the interleaving of sources"]);
    refused(&["data.sources=[{name_or_path: a, repeat: -1}]"], &["data.sources.0.repeat: expected a number above 0"]);
    refused(
        &["data.eval_sources=[{name_or_path: b, repeat: 2}]", "eval_interval=1"],
        &["data.eval_sources.0.repeat: an evaluation reads every row once"],
    );
    let note = "data.stopping_strategy and weight have no effect with one source";
    assert!(plan(&["data.stopping_strategy=all_exhausted"]).notes.iter().any(|own| own == note));
}

#[test]
fn keys_of_other_toolkits_name_the_mixture_and_the_mask() {
    refused(&["data.train_on_eot=turn"], &["data.train_on_eos"]);
    refused(&["mask_history=true"], &["data.masking_strategy", "train_on_last"]);
    refused(&["data.mix_strategy=interleave_over"], &["data.stopping_strategy"]);
    refused(&["interleave_probs=[0.5, 0.5]"], &["data.sources.N.weight"]);
    refused(&["data.sources=[{name_or_path: a, upsample: 2}]"], &["data.sources.N.repeat"]);
}
