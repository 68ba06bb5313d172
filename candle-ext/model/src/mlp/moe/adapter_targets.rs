//! Selection of a mixture of experts' parts that get LoRA: the shared expert, its gate, the router, and the experts.
//!
//! Experts are modules of their own in transformers 4 (`target_modules`), and 3-D parameters in transformers 5
//! (`target_parameters`). Both names select the same matrices here.

use std::ops::Range;

use super::adapter::{ExpertAdapterFiles, ExpertAdapterSpec};
use super::spec::{ExpertMatrixSpec, MoeSpec};
use crate::lora::{AdapterNames, LoraTargets, factors, targeted_twice};
use crate::mlp::MlpSpec;
use crate::{HubLayout, HubTensor, HubTensors, LinearSpec, ModelError, ParamScope, ParamSpec};

/// Output columns of an expert's matrix that one module of transformers 4 holds.
struct ExpertPart {
    /// Name of the adapter in memory.
    module: String,
    /// Names of the experts' modules.
    modules: Vec<String>,
    columns: Range<usize>,
}

/// Adds the adapters that `targets` select to a layer. Returns their factors.
pub(super) fn attach(moe: &mut MoeSpec, targets: &LoraTargets, layer_idx: usize) -> Result<Vec<ParamSpec>, ModelError> {
    let mut params = targets.attach_linears(moe.linears_mut(), layer_idx, ParamScope::Sublayer)?;
    let gate = moe.shared_expert.as_mut().and_then(|shared| shared.gate.as_mut());
    params.extend(targets.attach_linears(gate, layer_idx, ParamScope::ResidualStream)?);
    let transforms = targets.transforms(layer_idx);
    params.extend(router(targets, moe, transforms)?);
    experts(targets, moe, transforms)?;
    params.extend(moe.expert_matrices().into_iter().flat_map(ExpertMatrixSpec::factors));
    Ok(params)
}

/// Returns the names that adapters may target.
pub(super) fn names(moe: &MoeSpec) -> AdapterNames {
    let linears: Vec<&LinearSpec> = moe.linears().into_iter().chain(moe.shared_expert_gate()).collect();
    let parameters = [moe.router_weight.weight_name(), moe.gate_up.name.clone(), moe.down.name.clone()];
    let experts = moe.hub.linears.iter().flat_map(|linear| moe.expert_modules(linear));
    let first = moe.hub.linears.iter().filter_map(|linear| moe.expert_modules(linear).next());
    let examples = std::iter::once(moe.hub_router_module()).chain(first).collect::<Vec<_>>().join(", ");
    let mut names = AdapterNames::of_linears(&linears);
    names.of_experts = std::iter::once(moe.hub_router_module()).chain(experts).collect();
    names.example_of_experts = Some([examples, parameters.join(", ")]);
    names.parameters.extend(parameters);
    names
}

/// Adds an adapter to the router: module `mlp.gate` of transformers 4, or parameter `mlp.gate.weight`.
fn router(targets: &LoraTargets, moe: &mut MoeSpec, transforms: bool) -> Result<Vec<ParamSpec>, ModelError> {
    let (module, weight) = (moe.router_weight.module.clone(), moe.router_weight.weight_name());
    let on_disk = moe.hub_router_module();
    let by_module = transforms && targets.hits_named(&on_disk)?;
    let files = match (by_module, targets.hits_parameter(&weight)) {
        (true, true) => return Err(targeted_twice(&weight)),
        (false, false) => return Ok(Vec::new()),
        (true, false) => &on_disk,
        (false, true) => &module,
    };
    let adapter = targets.adapter(&module, if by_module { &on_disk } else { &weight })?;
    let router = &mut moe.router_weight;
    let params = factors(&adapter, [router.out, router.input], ParamScope::ResidualStream);
    router.adapter = Some(adapter);
    Ok(params.map(|param| renamed(param, &module, files)).into())
}

/// Adds adapters to the matrices of the experts.
fn experts(targets: &LoraTargets, moe: &mut MoeSpec, transforms: bool) -> Result<(), ModelError> {
    let by_parameter = [&moe.gate_up, &moe.down].map(|matrix| targets.hits_parameter(&matrix.name));
    let parts = [moe.expert_parts(&moe.hub.linears[..2]), moe.expert_parts(&moe.hub.linears[2..])];
    let is_nested = by_parameter == [true, true];
    // PEFT wraps the first parameter in the wrapper of the second one.
    let files = [if is_nested { "experts.base_layer" } else { "experts" }, "experts"];
    let prefix = moe.module.clone();
    for (((matrix, parts), by_parameter), files) in
        [&mut moe.gate_up, &mut moe.down].into_iter().zip(parts).zip(by_parameter).zip(files)
    {
        let parts = parts.into_iter().filter(|_| transforms && !targets.config().skips_expert_modules);
        let adapters = parts.map(|part| per_expert(targets, part)).collect::<Result<Vec<_>, _>>()?;
        matrix.adapters = adapters.into_iter().flatten().collect();
        if by_parameter {
            if !matrix.adapters.is_empty() {
                return Err(targeted_twice(&matrix.name));
            }
            matrix.adapters = vec![parameter(targets, matrix, format!("{prefix}.{files}"))?];
        }
    }
    Ok(())
}

/// Returns the adapter of the experts' modules, if the rules select them all.
fn per_expert(targets: &LoraTargets, part: ExpertPart) -> Result<Option<ExpertAdapterSpec>, ModelError> {
    let ExpertPart { module, modules, columns } = part;
    let hits = modules.iter().map(|module| targets.hits_named(module)).collect::<Result<Vec<_>, _>>()?;
    let n_hits = hits.iter().filter(|hit| **hit).count();
    if n_hits == 0 {
        return Ok(None);
    }
    if let Some(i) = hits.iter().position(|hit| !hit) {
        let problem = format!(
            "{n_hits} of the {} experts of a layer match, but `{}` does not; an adapter covers all experts of a \
             layer: use the name without its number",
            modules.len(),
            modules[i]
        );
        return Err(ModelError::lora("target_modules", problem));
    }
    let adapter = targets.adapter(&module, &modules[0])?;
    for other in &modules {
        if targets.adapter(&module, other)? != adapter {
            let problem = format!("`{other}` and `{}` differ; all experts of a layer have one rank", modules[0]);
            return Err(ModelError::lora("rank_pattern", problem));
        }
    }
    Ok(Some(ExpertAdapterSpec { adapter, columns, files: ExpertAdapterFiles::PerExpert(modules) }))
}

/// Returns the adapter of a 3-D parameter.
fn parameter(targets: &LoraTargets, matrix: &ExpertMatrixSpec, files: String) -> Result<ExpertAdapterSpec, ModelError> {
    if targets.config().has_exchanged_parameters && matrix.out == matrix.input.len {
        let problem = format!(
            "PEFT before 0.19.1 exchanged inputs and outputs of `{}`, and as both are {} the shapes of `{files}.lora_A` \
             and `{files}.lora_B` do not show it; merge the adapter with that PEFT",
            matrix.name, matrix.out
        );
        return Err(ModelError::lora("peft_version", problem));
    }
    let adapter = targets.adapter(&matrix.name, &matrix.name)?;
    Ok(ExpertAdapterSpec { adapter, columns: 0..matrix.out, files: ExpertAdapterFiles::Parameter(files) })
}

impl MoeSpec {
    /// Returns the modules of an expert's matrix that stacks `linears`.
    fn expert_parts(&self, linears: &[&'static str]) -> Vec<ExpertPart> {
        let height = if linears.len() > 1 { self.expert_size } else { self.down.out };
        let names: &[&str] = if linears.len() > 1 { &["gate_proj", "up_proj"] } else { &["down_proj"] };
        let part = |(i, (name, linear)): (usize, (&&str, &&'static str))| ExpertPart {
            module: format!("{}.experts.{name}", self.module),
            modules: self.expert_modules(linear).collect(),
            columns: i * height..(i + 1) * height,
        };
        names.iter().zip(linears).enumerate().map(part).collect()
    }
}

impl ExpertMatrixSpec {
    /// Returns the factors of all adapters.
    fn factors(&self) -> impl Iterator<Item = ParamSpec> {
        self.adapters.iter().flat_map(|adapter| adapter.params(self))
    }
}

/// Sets the name of a router's factor in an adapter folder, if it differs.
fn renamed(param: ParamSpec, module: &str, on_disk: &str) -> ParamSpec {
    if module == on_disk {
        return param;
    }
    let tensors = vec![HubTensor { name: param.name.replacen(module, on_disk, 1), rows: 0..param.shape[0] }];
    let hub = HubTensors { fused_shape: param.shape.clone(), tensors, layout: HubLayout::Rows };
    ParamSpec { hub: Some(Box::new(hub)), ..param }
}
