//! Memory of masters, moments and weights: the device that computes, or the host.

use candle_core::Device;
use candlewick_model::{FsdpUnit, ParamSpec};

/// TokenShard of the parameters and of the optimizer in the memory of a GPU's host.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CpuOffload {
    /// The fraction of the parameters whose masters and moments are there: the first units. AdamW updates them on the host.
    pub optimizer: f64,
    /// True if all weights are there, too; a unit's are copied to the device when it is computed. Needs `optimizer` 1.
    pub weights: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryLocation {
    /// On the device that computes.
    Device,
    /// In the host's memory.
    Host,
}

/// Memory of one unit's parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UnitOffload {
    pub(crate) weights: MemoryLocation,
    /// Masters and moments.
    pub(crate) optimizer: MemoryLocation,
}

impl MemoryLocation {
    /// Returns the device with this memory; `device` computes.
    pub(crate) fn device(self, device: &Device) -> &Device {
        match self {
            Self::Device => device,
            Self::Host => &Device::Cpu,
        }
    }
}

impl CpuOffload {
    /// Returns the memory of each unit: the first ones are offloaded, as many as come closest to the fraction.
    pub(crate) fn of_units(self, units: &[FsdpUnit]) -> Vec<UnitOffload> {
        let wanted = self.optimizer * units.iter().map(n_trainable).sum::<f64>();
        let mut n_seen = 0.0;
        let of_unit = |unit: &FsdpUnit| {
            // A unit is offloaded whole, if more than half of it falls below the fraction.
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
