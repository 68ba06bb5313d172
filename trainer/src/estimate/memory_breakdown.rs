//! Bytes of memory by category.

use std::collections::BTreeMap;

use serde::Serialize;

/// The use of a part of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// Weights that forward and backward read: frozen weights and the compute copies of trained ones.
    Weights,
    /// FP8 copies of the weights of a step, and the amaxes of delayed scaling.
    Fp8Weights,
    /// Master weights that the optimizer updates, where they are separate from the compute copy.
    Masters,
    /// Accumulated gradients.
    Gradients,
    /// Optimizer states.
    #[serde(rename = "moments")]
    OptimizerStates,
    /// Activations that blocks save from forward to backward.
    Activations,
    /// Temporaries of the current block: recomputed activations, gradients of activations, f32 copies.
    Block,
    /// The logits of a chunk of tokens, and the loss's temporaries.
    Logits,
    /// Staging buffers of a parameter that is loaded, or of a chunk that is written.
    Transfer,
    /// A unit's weights or gradients in an all-gather or reduce-scatter.
    Exchange,
    /// The KV cache of task evaluation.
    Cache,
    /// The copy of masters and optimizer states that an asynchronous checkpoint writes.
    Copy,
    /// The program, the tokenizer and the data index; on a GPU also the CUDA context and libraries.
    Program,
    /// Freed memory that the allocator caches or has fragmented.
    Allocator,
}

impl Category {
    /// All categories, in the order of the table's columns.
    pub const ALL: [Self; 14] = [
        Self::Weights,
        Self::Fp8Weights,
        Self::Masters,
        Self::Gradients,
        Self::OptimizerStates,
        Self::Activations,
        Self::Block,
        Self::Logits,
        Self::Transfer,
        Self::Exchange,
        Self::Cache,
        Self::Copy,
        Self::Program,
        Self::Allocator,
    ];

    /// Returns its name in a table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::Fp8Weights => "FP8 weights",
            Self::Masters => "master weights",
            Self::Gradients => "gradients",
            Self::OptimizerStates => "optimizer states",
            Self::Activations => "saved activations",
            Self::Block => "current block",
            Self::Logits => "logits",
            Self::Transfer => "load/save buffers",
            Self::Exchange => "communication",
            Self::Cache => "KV cache",
            Self::Copy => "checkpoint copy",
            Self::Program => "program",
            Self::Allocator => "allocator slack",
        }
    }
}

/// Bytes by category. An absent category has 0 bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct MemoryBreakdown(BTreeMap<Category, u64>);

impl MemoryBreakdown {
    /// Returns this breakdown with `bytes` added to a category.
    #[must_use]
    pub fn with(mut self, category: Category, bytes: u64) -> Self {
        if bytes > 0 {
            *self.0.entry(category).or_default() += bytes;
        }
        self
    }

    /// Returns the sum of two breakdowns.
    #[must_use]
    pub fn plus(self, other: &Self) -> Self {
        other.0.iter().fold(self, |sum, (category, bytes)| sum.with(*category, *bytes))
    }

    /// Returns the bytes of a category.
    pub fn of(&self, category: Category) -> u64 {
        self.0.get(&category).copied().unwrap_or(0)
    }

    /// Returns the bytes of all categories.
    pub fn total(&self) -> u64 {
        self.0.values().sum()
    }
}

/// Formats bytes in the unit that fits: `512 B`, `37.5 MiB`, `1.25 GiB`.
pub fn format_bytes(n: u64) -> String {
    const UNITS: [(u64, &str, usize); 3] = [(1 << 30, "GiB", 2), (1 << 20, "MiB", 1), (1 << 10, "KiB", 1)];
    match UNITS.iter().find(|(unit, ..)| n >= *unit) {
        Some((unit, name, digits)) => format!("{:.digits$} {name}", n as f64 / *unit as f64),
        None => format!("{n} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_the_unit_that_fits() {
        let cases = [(0, "0 B"), (1023, "1023 B"), (1 << 10, "1.0 KiB"), (3 << 19, "1.5 MiB"), (5 << 28, "1.25 GiB")];
        for (n, want) in cases {
            assert_eq!(format_bytes(n), want);
        }
    }
}
