//! Modules that `precision.exclude_slower_modules` keeps in the compute dtype: those of the run that is continued, or measured
//! ones.

use anyhow::Result;
use candlewick_model::Model;
use candlewick_runtime::process_group::ProcessGroup;
use serde::{Deserialize, Serialize};

use super::RankContext;
use super::checkpointer::{settings, state_to_resume};
use crate::fp8_advice::advise;
use crate::plan::Plan;

/// Run that may have measured the modules already.
pub(super) enum EarlierRun<'a> {
    /// The run of the checkpoint that the plan resumes, if there is one.
    Resumed,
    /// The run whose batch is replayed, with its modules.
    Replayed(Option<&'a [String]>),
}

/// Modules that FP8 does not make faster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct SlowerModules {
    names: Vec<String>,
    /// True if this run has measured them.
    is_measured: bool,
}

/// With `precision.exclude_slower_modules`, keeps modules in the compute dtype that FP8 does not make faster on the first
/// rank's device. Returns also their names.
///
/// A measurement has other results each time. So a resumed run keeps the modules of its checkpoint, and has the bits of a run
/// that was not interrupted.
pub(super) fn exclude(
    plan: &Plan,
    model: Model,
    ranks: &RankContext,
    earlier: &EarlierRun<'_>,
    notes: &mut Vec<String>,
) -> Result<(Model, Option<Vec<String>>)> {
    let Some(fp8) = plan.fp8.as_ref().filter(|fp8| fp8.exclude_slower_modules) else { return Ok((model, None)) };
    let slower = of_first_rank(&ranks.process, || {
        if let Some(names) = earlier.slower_modules(plan)? {
            return Ok(SlowerModules { names, is_measured: false });
        }
        let advice = advise(plan, &model, fp8.config(plan.seed), &ranks.device)?;
        Ok(SlowerModules { names: advice.slower_modules().map(str::to_owned).collect(), is_measured: true })
    })?;
    let (model, note) = without(model, &slower);
    notes.push(note);
    Ok((model, Some(slower.names)))
}

impl EarlierRun<'_> {
    /// Returns the modules that the earlier run kept in the compute dtype; `None` if this run must measure them.
    fn slower_modules(&self, plan: &Plan) -> Result<Option<Vec<String>>> {
        match self {
            Self::Replayed(names) => Ok(names.map(<[String]>::to_vec)),
            Self::Resumed => of_checkpoint(plan),
        }
    }
}

/// Returns the modules of the checkpoint that the plan resumes; `None` without one, or if it has other settings of FP8.
fn of_checkpoint(plan: &Plan) -> Result<Option<Vec<String>>> {
    let Some(state) = state_to_resume(plan)? else { return Ok(None) };
    let changes = state.settings.differences(&settings(plan));
    let is_same = !changes.iter().any(|change| change.starts_with("precision."));
    Ok(state.slower_modules.filter(|_| is_same))
}

/// Returns the modules that the first rank chooses, on all ranks.
fn of_first_rank(process: &ProcessGroup, choose: impl FnOnce() -> Result<SlowerModules>) -> Result<SlowerModules> {
    let chosen = process.broadcast_from_first(|| Ok(serde_json::to_vec(&choose()?)?))?;
    Ok(serde_json::from_slice(&chosen)?)
}

/// Returns the model without FP8 in the slower modules, and a note about them.
fn without(model: Model, slower: &SlowerModules) -> (Model, String) {
    let all = model.fp8_modules().into_iter().map(|module| module.name);
    let (slower_ones, faster): (Vec<String>, Vec<String>) = all.partition(|name| slower.names.contains(name));
    let reason = match slower.is_measured {
        true => "are faster in model.dtype",
        false => "stay in model.dtype, as in the run that is continued",
    };
    let note = format!(
        "precision.exclude_slower_modules: {} linear layers multiply in FP8, {} {reason}",
        faster.len(),
        slower_ones.len()
    );
    (model.with_fp8(&faster), note)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use candlewick_comm::{Options, threads};
    use candlewick_model::Config;

    use super::*;

    fn measured(names: &[&str]) -> SlowerModules {
        SlowerModules { names: names.iter().map(|name| (*name).to_owned()).collect(), is_measured: true }
    }

    fn model() -> Model {
        let config = serde_json::json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 8,
            "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 16, "rms_norm_eps": 1e-5,
        });
        let model = Model::new(Config::from_json(config).unwrap(), None).unwrap();
        let all: Vec<String> = model.layers().flat_map(|layer| layer.linears()).map(|it| it.module.clone()).collect();
        model.with_fp8(&all)
    }

    fn names(model: &Model) -> Vec<String> {
        model.fp8_modules().into_iter().map(|module| module.name).collect()
    }

    #[test]
    fn slower_modules_leave_fp8_and_the_others_stay() {
        let all = names(&model());
        let slower = ["model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj"];
        let (model, note) = without(model(), &measured(&slower));
        let faster: Vec<String> = all.into_iter().filter(|name| !slower.contains(&name.as_str())).collect();
        assert_eq!(names(&model), faster);
        assert!(note.contains("12 linear layers multiply in FP8, 2 are faster in model.dtype"), "{note}");
    }

    /// Ranks measure different times, so that only the first one measures.
    #[test]
    fn all_ranks_have_the_modules_of_the_first() {
        let chosen = threads::run(3, Options::default(), |world| {
            let process = ProcessGroup::new(world)?;
            let rank = process.rank();
            of_first_rank(&process, || Ok(measured(&[&format!("of rank {rank}")])))
        });
        assert_eq!(chosen.unwrap(), vec![measured(&["of rank 0"]); 3]);
    }
}
