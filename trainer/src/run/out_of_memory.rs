//! The report of a run that ran out of device memory.

use std::fmt;

use anyhow::Error;
use candle_core::{Device, DeviceLocation};
use candlewick_ops::{DeviceChoice, DeviceMemory, device_memory, is_out_of_memory};
use candlewick_parallel::StoreBytes;

use crate::estimate::{Capacity, DeviceKind, EstimateReport, Setup, estimate, format_bytes};
use crate::plan::Plan;

/// The memory use of a run that ran out of device memory.
struct MemoryReport {
    device: DeviceChoice,
    measured: Option<DeviceMemory>,
    /// Bytes of the parameters; `None` if the allocation of the parameters failed.
    parameters: Option<StoreBytes>,
    /// The estimate, with settings that need less memory; `None` if the plan cannot be estimated.
    estimate: Option<EstimateReport>,
}

/// Adds a memory report to a failed allocation on `device`: the bytes in use by category, the estimate, and settings
/// that would fit. Returns other errors unchanged.
pub(super) fn explain(error: Error, plan: &Plan, device: &Device, parameters: Option<StoreBytes>) -> Error {
    if !error.chain().any(is_out_of_memory) {
        return error;
    }
    let measured = device_memory(device);
    let (compute_device, device) = match device.location() {
        DeviceLocation::Cuda { gpu_id } => (DeviceKind::Gpu, DeviceChoice::Cuda(gpu_id)),
        _ => (DeviceKind::Cpu, DeviceChoice::Cpu),
    };
    let estimate = estimated(plan, compute_device, device, measured);
    error.context(MemoryReport { device, measured, parameters, estimate }.to_string())
}

/// Compares the plan's estimate with the device's memory. If the estimate fits although the run did not, compares it
/// with 90% of itself, so that settings that need less are recommended.
fn estimated(
    plan: &Plan,
    compute_device: DeviceKind,
    device: DeviceChoice,
    measured: Option<DeviceMemory>,
) -> Option<EstimateReport> {
    let setup = Setup::of(plan, compute_device).ok()?;
    let estimated = estimate(&setup).peak_bytes();
    let (capacity_bytes, name) = match measured {
        Some(DeviceMemory { total_bytes, .. }) if total_bytes < estimated => (total_bytes, device.to_string()),
        _ => (estimated / 10 * 9, "90% of the estimate, which was too low".to_owned()),
    };
    Some(EstimateReport::new(
        plan.recipe.display().to_string(),
        &setup,
        &Capacity::of(compute_device, Some(capacity_bytes), name),
    ))
}

impl MemoryReport {
    /// Lists the bytes in use by category.
    fn checkpoint_in_use(&self) -> Vec<(&'static str, u64)> {
        let StoreBytes { weights, masters, gradients, optimizer_states } = self.parameters.unwrap_or_default();
        let known = [
            ("weights", weights),
            ("master weights", masters),
            ("gradients", gradients),
            ("optimizer states", optimizer_states),
        ];
        let rest = self
            .measured
            .zip(self.parameters)
            .map_or(0, |(memory, parameters)| memory.peak_bytes.saturating_sub(parameters.total()));
        let all = known.into_iter().chain([("activations and scratch", rest)]);
        all.filter(|(_, n_bytes)| *n_bytes > 0).collect()
    }
}

impl fmt::Display for MemoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "out of memory on {}", self.device)?;
        if let Some(DeviceMemory { peak_bytes, total_bytes }) = self.measured {
            write!(f, ": {} of {} were in use", format_bytes(peak_bytes), format_bytes(total_bytes))?;
        }
        for (class, n_bytes) in self.checkpoint_in_use() {
            write!(f, "\n  {class:<24}{:>11}", format_bytes(n_bytes))?;
        }
        match &self.estimate {
            Some(estimate) => write!(f, "\nestimate: {}", estimate.to_string().trim_end()),
            None => Ok(()),
        }
    }
}
