//! Loss masks by role and end of turn, prompts without a template, and mixtures of sources, on prepared data.

use serde_json::json;
use trainer::data::{DataPlan, MaskingStrategy, Mixture, SourcePlan, StoppingStrategy, TrainOnEos, TrainedRole};

use crate::data::{Bench, chat, chats};

fn conversation() -> String {
    json!({"messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "0+1?"}, {"role": "assistant", "content": "1"},
        {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"},
    ]})
    .to_string()
}

/// Returns the targets of one conversation, and the notes.
fn targets(bench: &Bench, change: impl FnOnce(DataPlan) -> DataPlan) -> (Vec<String>, String) {
    let plan = bench.plan(bench.write("train.jsonl", &[conversation()]));
    let prepared = bench.prepare(&change(plan)).unwrap();
    let shown = bench.shown(&prepared.train).remove(0);
    let targets = shown.split('[').skip(1).map(|part| part.split(']').next().unwrap().to_owned());
    (targets.collect(), prepared.notes.join("\n"))
}

#[test]
fn the_last_turn_alone_is_trained_on() {
    let last = |plan| DataPlan { masking_strategy: MaskingStrategy::TrainOnLast, ..plan };
    assert_eq!(targets(&Bench::new(), last).0, ["2<|im_end|>"]);
}

#[test]
fn each_selected_role_is_trained_on() {
    let bench = Bench::new();
    let with = |roles: &[TrainedRole]| targets(&bench, |plan| DataPlan { roles_to_train: roles.to_vec(), ..plan }).0;
    assert_eq!(with(&[TrainedRole::User]), ["0+1?<|im_end|>", "1+1?<|im_end|>"]);
    assert_eq!(
        with(&[TrainedRole::System, TrainedRole::Assistant]),
        ["Be brief.<|im_end|>", "1<|im_end|>", "2<|im_end|>"]
    );
}

#[test]
fn ends_of_turns_are_trained_on_as_set() {
    let bench = Bench::new();
    let with = |train_on_eos| targets(&bench, |plan| DataPlan { train_on_eos, ..plan });
    assert_eq!(with(TrainOnEos::Turn).0, ["1<|im_end|>", "2<|im_end|>"]);
    assert_eq!(with(TrainOnEos::Last).0, ["1", "2<|im_end|>"]);
    assert_eq!(with(TrainOnEos::All).0, ["<|im_end|>", "<|im_end|>", "1<|im_end|>", "<|im_end|>", "2<|im_end|>"]);
    let (none, notes) = with(TrainOnEos::None);
    assert_eq!(none, ["1", "2"]);
    assert!(notes.contains("no end of an answer is trained on"), "{notes}");
}

/// Entries of other masks stay in the cache; a default mask is found there.
#[test]
fn another_mask_is_tokenized_apart() {
    let bench = Bench::new();
    let default = |plan| plan;
    let last = |plan| DataPlan { masking_strategy: MaskingStrategy::TrainOnLast, ..plan };
    targets(&bench, default);
    let (_, notes) = targets(&bench, last);
    assert!(notes.contains("changed since they were cached: masking_strategy"), "{notes}");
    for change in [default as fn(DataPlan) -> DataPlan, last] {
        assert!(targets(&bench, change).1.contains("tokens from the cache"));
    }
}

#[test]
fn pairs_without_the_template_are_trained_on_with_chats() {
    let bench = Bench::new();
    let pair = json!({"prompt": "0+1?", "completion": " 1"}).to_string();
    let pairs = SourcePlan { apply_chat_template: false, ..bench.write("pairs.jsonl", &[pair]) };
    let plan = bench.plan(pairs.clone());
    let sources = vec![pairs, bench.write("chats.jsonl", &chats(1))];
    let prepared = bench.prepare(&DataPlan { sources, ..plan }).unwrap();
    let shown = bench.shown(&prepared.train);
    assert_eq!(shown[0], "0+1?[ 1<|im_end|>]");
    assert!(shown[1].starts_with("<|im_start|>user"), "{}", shown[1]);
}

#[test]
fn chats_need_their_template() {
    let bench = Bench::new();
    let source = SourcePlan { apply_chat_template: false, ..bench.write("train.jsonl", &chats(1)) };
    let message = bench.prepare(&bench.plan(source)).unwrap_err().to_string();
    assert!(message.contains("remove apply_chat_template: false"), "{message}");
    let list =
        json!({"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]});
    let source = SourcePlan { apply_chat_template: false, ..bench.write("list.jsonl", &[list.to_string()]) };
    let message = bench.prepare(&bench.plan(source)).unwrap_err().to_string();
    assert!(message.contains("list.jsonl:1") && message.contains("apply_chat_template: false"), "{message}");
}

#[test]
fn weights_tokenize_nothing_again_and_the_first_epoch_is_described() {
    let bench = Bench::new();
    let few = bench.write("few.jsonl", &chats(4));
    let many = bench.write("many.jsonl", &(0..12).map(|i| chat("Hi", &"x".repeat(i + 1))).collect::<Vec<_>>());
    let plan = DataPlan { sources: vec![few.clone(), many], ..bench.plan(few) };
    let first = bench.prepare(&plan).unwrap();
    let notes = first.notes.join("\n");
    assert!(notes.contains("few.jsonl: 4 sequences, ") && notes.contains("tokens, 1.00 times the source"), "{notes}");
    let weights =
        Mixture::Interleave { probabilities: vec![0.5, 0.5], stopping_strategy: StoppingStrategy::AllExhausted };
    for mixture in [Mixture::Repeat(vec![3.0, 1.0]), weights] {
        let prepared = bench.prepare(&DataPlan { mixture: mixture.clone(), ..plan.clone() }).unwrap();
        let notes = prepared.notes.join("\n");
        assert_eq!(notes.matches("tokens from the cache").count(), 2, "{notes}");
        assert_eq!(notes.contains("few.jsonl: 12 sequences"), matches!(mixture, Mixture::Repeat(_)), "{notes}");
    }
}
