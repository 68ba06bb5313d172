//! The description of a run for the trackers and the terminal.

use std::collections::BTreeMap;

use candlewick_ops::gpus;

use crate::metrics::{RunDescription, Versions};
use crate::plan::Plan;

use super::context::TrainingRun;

/// Describes a run of `total_steps` on a GPU, or on the CPU.
pub(super) fn describe(run: &TrainingRun, total_steps: usize, gpu_id: Option<usize>) -> RunDescription {
    let plan = run.plan;
    let (frozen, trained) = plan.parameter_counts().unwrap_or_default();
    let rows = plan.data.rows_per_step();
    let output_dir = plan.log.output_dir.clone().unwrap_or_default();
    let folder_name = output_dir.file_name().map(|name| name.to_string_lossy().into_owned());
    let name = plan.log.tracking.run_name.clone().or(folder_name);
    let settings = plan.settings.iter().map(|setting| (setting.key.clone(), setting.value.clone()));
    RunDescription {
        run_id: run.run_id.run,
        name: name.unwrap_or_else(|| "run".to_owned()),
        output_dir,
        parameters: frozen + trained,
        trained_parameters: trained,
        active_parameters: plan.active_parameters(),
        mesh: BTreeMap::from_iter(plan.mesh().into_iter().chain([("world_size", plan.ranks.n_ranks())])),
        global_batch_size: rows,
        global_batch_tokens: (plan.data.max_length > 0).then_some(rows * plan.data.max_length),
        total_steps,
        device: gpu_id.map_or_else(|| "cpu".to_owned(), gpu_name),
        versions: Some(Versions::this()),
        settings: settings.collect(),
    }
}

/// Returns the lines of the description for the terminal: model and device. One device has no mesh.
pub(super) fn lines(plan: &Plan, device: &str) -> Vec<String> {
    let degrees: Vec<String> = plan.mesh().iter().map(|(axis, degree)| format!("{axis} {degree}")).collect();
    let n_ranks = plan.ranks.n_ranks();
    let lines = [
        Some(format!("model: {}", model_name(plan))),
        plan.parameters().map(|parameters| format!("parameters: {parameters}")),
        Some(format!("device: {device}, candlewick {}", Versions::this())),
        (n_ranks > 1).then(|| format!("mesh: world_size {n_ranks}, {}", degrees.join(", "))),
    ];
    lines.into_iter().flatten().collect()
}

/// Returns the folder or repository of the model, or the architecture of a new one.
fn model_name(plan: &Plan) -> String {
    let family = || plan.model.config.as_ref().map_or("new", |config| config.family().name());
    plan.model.name_or_path.clone().unwrap_or_else(|| format!("{}, with new weights", family()))
}

fn gpu_name(gpu_id: usize) -> String {
    gpus().into_iter().nth(gpu_id).map_or_else(|| format!("cuda:{gpu_id}"), |gpu| gpu.name)
}
