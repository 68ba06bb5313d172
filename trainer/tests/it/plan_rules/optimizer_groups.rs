//! Groups of parameters with optimizer settings of their own.

use candlewick_parallel::DecayedParams;

use super::{plan, refused, resolve};

/// Returns the argument of these groups.
fn groups(groups: &str) -> String {
    format!("optimizer.groups=[{groups}]")
}

#[test]
fn a_group_inherits_what_it_does_not_set() {
    let embeddings =
        groups("{pattern: embed_tokens|lm_head, lr: 1e-5}, {name: biases, pattern: norm, weight_decay: 0.2}");
    let plan = plan(&["optimizer.lr=4e-5", "optimizer.weight_decay=0.1", "optimizer.betas=[0.8, 0.9]", &embeddings]);
    let [first, second] = &plan.optimizer.groups[..] else { panic!("{:?}", plan.optimizer.groups) };
    assert_eq!((&*first.name, first.learning_rate, first.weight_decay), ("group_0", 1e-5, None));
    assert_eq!((&*second.name, second.learning_rate, second.weight_decay), ("biases", 4e-5, Some(0.2)));
    assert_eq!(first.kind.0.settings(), [("beta1", 0.8), ("beta2", 0.9), ("eps", 1e-8)]);
    let groups = plan.optimizer.groups();
    let settings = groups.groups().iter().map(|group| (group.lr_factor, group.weight_decay, group.decayed));
    let want =
        [(0.25, 0.1, DecayedParams::Matrices), (1.0, 0.2, DecayedParams::All), (1.0, 0.1, DecayedParams::Matrices)];
    assert_eq!(settings.collect::<Vec<_>>(), want);
    let rates = plan.optimizer.group_rates(2e-5);
    assert_eq!((rates["group_0"], rates["biases"]), (5e-6, 2e-5));
}

#[test]
fn a_group_has_betas_of_its_own() {
    let plan = plan(&[&groups("{pattern: norm, betas: [0.5, 0.6], eps: 1e-6, learning_rate_factor: 4}")]);
    let group = &plan.optimizer.groups[0];
    assert_eq!(group.kind.0.settings(), [("beta1", 0.5), ("beta2", 0.6), ("eps", 1e-6)]);
    assert_eq!(group.learning_rate, 4.0 * plan.optimizer.learning_rate);
}

#[test]
fn wrong_groups_are_refused_at_their_keys() {
    let check = |wrong: &str, want: &[&str]| refused(&[&groups(wrong)], want);
    check("{lr: 1}", &["optimizer.groups.0 has no pattern", "embed_tokens|lm_head"]);
    check("{pattern: '('}", &["optimizer.groups.0.pattern: \"(\" is no regular expression"]);
    check("{pattern: experts}", &["leaves has a name with the pattern \"experts\"", "model.embed_tokens.weight"]);
    check("{pattern: '(.|.|..)*(?>!)'}", &["failed to search", "model.embed_tokens.weight", "backtracking"]);
    check("{pattern: norm}, {pattern: layernorm}", &["an earlier group leaves", "pattern \"layernorm\""]);
    check("{pattern: norm, lr: -1}", &["optimizer.groups.0.learning_rate: expected at least 0, found -1"]);
    check("{pattern: norm, lr: 1, learning_rate_factor: 2}", &["learning_rate_factor exclude each other"]);
    check(
        "{pattern: norm, betas: [1, 0]}",
        &["optimizer.groups.0.betas: expected two numbers of at least 0 and below 1"],
    );
    check("{pattern: norm, weight_decay: -1}", &["optimizer.groups.0.weight_decay: expected at least 0"]);
    check("{pattern: norm, name: a}, {pattern: proj, name: a}", &["another group has the name \"a\""]);
    check("{pattern: norm, momentum: 1}", &["unknown", "momentum"]);
}

#[test]
fn an_error_of_a_group_names_its_line() {
    let recipe = "model: {name_or_path: org/model}\ndata: {sources: [a.jsonl]}\noptimizer:\n  groups:\n    - pattern: norm\n    \
                  - pattern: no_such_name\n";
    let error = resolve(recipe, &[]).unwrap_err().to_string();
    assert!(error.contains("recipes/r.yaml:6"), "{error}");
}
