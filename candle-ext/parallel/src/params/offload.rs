//! CPU offload of master weights, optimizer states and weights.

use candle_core::Device;
use candlewick_model::{FsdpUnit, ParamSpec};

/// CPU offload of parameters and optimizer states, as ZeRO-Offload.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CpuOffload {
    /// Fraction of the parameters whose master weights and optimizer states are in CPU memory, beginning with the first
    /// units. The CPU updates them.
    pub optimizer: f64,
    /// True if all weights are in CPU memory, too, and are copied to the device for each use. Requires `optimizer` 1.
    pub weights: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryLocation {
    /// Memory of the computing device.
    Device,
    /// CPU memory.
    Host,
}

/// Memory locations of one unit's parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UnitOffload {
    pub(crate) weights: MemoryLocation,
    /// Location of master weights and optimizer states.
    pub(crate) optimizer: MemoryLocation,
}

impl MemoryLocation {
    /// Returns the device of this memory; `device` computes.
    pub(crate) fn device(self, device: &Device) -> &Device {
        match self {
            Self::Device => device,
            Self::Host => &Device::Cpu,
        }
    }
}

impl CpuOffload {
    /// Returns the locations for each unit. The first units are offloaded, closest to the requested fraction.
    pub(crate) fn of_units(self, units: &[FsdpUnit]) -> Vec<UnitOffload> {
        let wanted = self.optimizer * units.iter().map(n_trainable).sum::<f64>();
        let mut n_seen = 0.0;
        let of_unit = |unit: &FsdpUnit| {
            // A unit is offloaded as a whole if more than half of it falls within the fraction.
            let is_offloaded = self.optimizer > 0.0 && n_seen + n_trainable(unit) / 2.0 <= wanted;
            n_seen += n_trainable(unit);
            let location = |on_host| if on_host { MemoryLocation::Host } else { MemoryLocation::Device };
            UnitOffload { weights: location(self.weights), optimizer: location(is_offloaded || self.weights) }
        };
        units.iter().map(of_unit).collect()
    }
}

fn n_trainable(unit: &FsdpUnit) -> f64 {
    unit.params.iter().filter(|spec| spec.trainable).map(ParamSpec::numel).sum::<usize>() as f64
}
