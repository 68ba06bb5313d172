//! The recipe's lock file: every repository of the recipe must have an entry.

use std::path::Path;

use candlewick_text::hub::{RepoId, RepoKind};

use super::environment::{RecipeLock, is_path};
use super::resolver::Resolver;
use crate::data::{DataPlan, hub_repo};
use crate::plan::{ModelPlan, TokenizerPlan};

/// Reports the model, the tokenizer and the data sets that the lock file lacks.
pub(super) fn check(resolver: &mut Resolver, model: &ModelPlan, tokenizer: &TokenizerPlan, data: &DataPlan) {
    let Some(lock) = resolver.env.lock.clone() else { return };
    let of_model = model.name_or_path.as_ref().and_then(|name| model_repo(name, model.revision.as_deref()));
    let of_tokenizer = model_repo(&tokenizer.name_or_path, tokenizer.revision.as_deref());
    let is_same = of_tokenizer == of_model;
    report_missing(resolver, &lock, of_model, "model.name_or_path");
    report_missing(resolver, &lock, of_tokenizer.filter(|_| !is_same), "tokenizer.name_or_path");
    for (key, sources) in [("data.sources", &data.sources), ("data.eval_sources", &data.eval_sources)] {
        for (idx, source) in sources.iter().enumerate() {
            let item = format!("{key}.{idx}");
            let key = if resolver.loaded.is_set(&item) { &item } else { key };
            report_missing(resolver, &lock, hub_repo(source), key);
        }
    }
}

/// Returns the repository and the revision of a model that is not a local path.
fn model_repo(name: &str, revision: Option<&str>) -> Option<(RepoId, String)> {
    let is_local = Path::new(name).exists() || is_path(name);
    let repo = RepoId::parse(RepoKind::Model, name).ok().filter(|_| !is_local)?;
    Some((repo, revision.unwrap_or("main").to_owned()))
}

fn report_missing(resolver: &mut Resolver, lock: &RecipeLock, of: Option<(RepoId, String)>, key: &str) {
    let Some((repo, revision)) = of.filter(|(repo, revision)| lock.lock.find(repo, revision).is_none()) else { return };
    let path = lock.context.path.display();
    let others = lock.lock.repositories.iter().filter(|locked| locked.kind == repo.kind());
    let others: Vec<String> = others.map(|locked| format!("{} at {}", locked.id, locked.revision)).collect();
    let kind = repo.kind().name();
    let message = format!("{key}: {path} has no entry for the {kind} {repo} at revision {revision}");
    let has = match others.is_empty() {
        true => String::new(),
        false => format!("it has {}; ", others.join(", ")),
    };
    let advice =
        format!("{has}run `{}` with a network to lock and download it, or remove {path}", lock.context.prefetch);
    resolver.report_with_advice(&[key, "model.name_or_path"], message, advice);
}
