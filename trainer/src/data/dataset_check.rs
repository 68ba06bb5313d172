//! Checks of a data set before the first step: targets, end-of-turn tokens, and BOS tokens.

use candlewick_text::render::Sample;
use candlewick_text::tokenizer::Tokenizer;

use super::DataError;
use super::dataset::Dataset;
use super::plan::{DataKind, DataPlan, SourcePlan, TrainOnEos, TrainedRole};
use super::token_stats::DatasetCounts;
use super::warnings::count_roles;

/// A data set with the facts that its checks need.
pub(crate) struct DatasetCheck<'a> {
    pub(crate) dataset: &'a Dataset,
    pub(crate) counts: &'a DatasetCounts,
    pub(crate) plan: &'a DataPlan,
    pub(crate) tokenizer: &'a Tokenizer,
}

impl DatasetCheck<'_> {
    /// Checks training data. Returns notes about accepted data.
    pub(crate) fn train(&self) -> Result<Vec<String>, DataError> {
        self.common("training")?;
        let mut notes = Vec::new();
        match self.plan.kind {
            DataKind::Sft if self.learns_to_stop() => {
                self.end_is_a_target()?;
                notes.extend(self.end_is_not_eos());
            }
            DataKind::Sft => {
                notes.push("no end of an answer is trained on (train_on_eos, roles_to_train, add_eos_token)".into());
            }
            DataKind::Causal if self.tokenizer.eos_ids().is_empty() => {
                notes.push("the tokenizer has no end-of-text token, so nothing separates texts".into());
            }
            DataKind::Causal => {}
        }
        Ok(notes)
    }

    /// Returns true if the plan trains on the ends of the assistant's answers.
    fn learns_to_stop(&self) -> bool {
        let DataPlan { train_on_eos, roles_to_train, add_eos_token, .. } = self.plan;
        *train_on_eos != TrainOnEos::None && roles_to_train.contains(&TrainedRole::Assistant) && *add_eos_token
    }

    /// Checks evaluation data.
    pub(crate) fn eval(&self) -> Result<(), DataError> {
        self.common("evaluation")
    }

    fn common(&self, which: &'static str) -> Result<(), DataError> {
        let DatasetCounts { read, kept, dropped, without_targets, .. } = *self.counts;
        if kept.tokens == 0 && without_targets.samples > 0 {
            let (n_tokens, place, fix) = (read.tokens, self.dataset.locate_sample(0), self.targets_advice());
            return Err(DataError::NothingSupervised { which, n_tokens, place, fix });
        }
        if kept.tokens == 0 {
            let why = format!("{} samples read, {} dropped", read.samples, dropped.samples);
            return Err(DataError::Empty { which, why });
        }
        self.start_is_single()
    }

    /// Returns the advice for data without targets.
    fn targets_advice(&self) -> String {
        let roles = count_roles(self.dataset, 0..self.dataset.n_samples());
        match self.plan.kind {
            DataKind::Causal => "Every text is shorter than two tokens: check the column".into(),
            DataKind::Sft if *self.plan.roles_to_train != [TrainedRole::Assistant] => {
                let wanted = TrainedRole::list(&self.plan.roles_to_train);
                format!(
                    "roles_to_train: {wanted}; roles: {roles}. Check that messages of these roles have text and no weight of 0"
                )
            }
            DataKind::Sft if !roles.is_empty() && !roles.has_assistant() => {
                let mapping = roles.mapping().map(|mapping| format!(": write {mapping}")).unwrap_or_default();
                format!("Roles: {roles}; none is assistant. Name the roles in the source{mapping}")
            }
            DataKind::Sft => {
                "Check that the rows have assistant messages that are not empty (a role_mapping may be missing) and \
                 that max_length does not cut them off"
                    .into()
            }
        }
    }

    fn start_is_single(&self) -> Result<(), DataError> {
        let is_doubled = |index: &usize| {
            let ids: Vec<u32> = self.dataset.get(*index).ids().take(2).collect();
            self.dataset.slices()[*index].start == 0 && self.tokenizer.has_doubled_bos(&ids)
        };
        let mut doubled = (0..self.dataset.len()).filter(is_doubled);
        let Some(first) = doubled.next() else { return Ok(()) };
        Err(DataError::DoubledStart {
            n_samples: 1 + doubled.count(),
            total: self.dataset.n_samples(),
            token: self.tokenizer.bos().map_or_else(String::new, |bos| bos.text.clone()),
            place: self.dataset.locate(first),
            fix: match self.plan.kind {
                DataKind::Causal => {
                    "The rows have one, and the tokenizer adds another; set data.add_bos_token: false, or remove it from \
                     the rows"
                }
                DataKind::Sft => {
                    "The chat template adds one, and so do the rows; remove it from the rows or from the template. For \
                     rows without a chat template, set data.add_bos_token: false"
                }
            },
        })
    }

    fn end_is_a_target(&self) -> Result<(), DataError> {
        if self.samples_with_targets().any(|sample| sample.has_eos_target(self.tokenizer)) {
            return Ok(());
        }
        let tokens: Vec<String> = self.ends().map(|text| format!("{text:?}")).collect();
        Err(DataError::EndNeverTarget {
            tokens: if tokens.is_empty() { "the special tokens".into() } else { tokens.join(", ") },
            place: self.dataset.locate(0),
            fix: self.end_advice(),
        })
    }

    fn end_advice(&self) -> &'static str {
        match self.plan.sources.iter().all(SourcePlan::is_tokenized) {
            true => {
                "The rows are tokenized (process: false), and no chat template is used: end each answer with this token \
                 and its label, or set `data.train_on_eos: none` to train on the labels as they are"
            }
            false => {
                "The chat template must print it after an assistant's turn, inside {% generation %} \
                 if it has that; with truncation: truncate every answer may be cut before its end; \
                 the tokenizer's eos_token may be missing"
            }
        }
    }

    /// Returns a note if turns end with another special token than the tokenizer's EOS.
    fn end_is_not_eos(&self) -> Option<String> {
        let eos_ids = self.tokenizer.eos_ids();
        let is_end = |sample: Sample| {
            sample.ids.iter().zip(&sample.is_target).any(|(id, is_target)| *is_target && eos_ids.contains(id))
        };
        if self.samples_with_targets().any(is_end) {
            return None;
        }
        let ends: Vec<String> = self.ends().collect();
        Some(format!(
            "turns end with a special token that is not the tokenizer's eos_token ({}): exports list it in \
             generation_config.json; a program that ignores this file needs it as a stop token",
            ends.join(", ")
        ))
    }

    /// Returns the sequences with their targets. The first token is never a target.
    fn samples_with_targets(&self) -> impl Iterator<Item = Sample> + '_ {
        (0..self.dataset.len()).map(|index| {
            let sample = self.dataset.get(index);
            let mut is_target: Vec<bool> = sample.target_mask().collect();
            is_target[..1].fill(false);
            Sample { ids: sample.ids().collect(), is_target, ..Sample::default() }
        })
    }

    fn ends(&self) -> impl Iterator<Item = String> + '_ {
        self.tokenizer.eos_ids().iter().filter_map(|&id| self.tokenizer.id_to_token(id))
    }
}
