//! Bytes by what they are for.

use std::collections::BTreeMap;

use serde::Serialize;

/// What memory is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// What forward and backward read: frozen weights and the compute copies of trained ones.
    Weights,
    /// What the optimizer updates, where that is not the compute copy itself.
    Masters,
    /// The sums of the gradients.
    Gradients,
    /// AdamW's two moments.
    Moments,
    /// What blocks keep between forward and backward.
    Activations,
    /// What the block at work needs besides: its tape if it is computed again, cotangents, widened copies.
    Block,
    /// The logits of some tokens and what is made of them.
    Logits,
    /// A parameter on its way in, or a piece on its way out.
    Transfer,
    /// A unit's weights or gradients on their way between ranks.
    Exchange,
    /// Keys and values of tokens that tasks have shown the model.
    Cache,
    /// What is saved while training goes on.
    Copy,
    /// The program, the tokenizer, the index of the data; on a GPU its context and libraries.
    Program,
    /// Freed memory that the allocator has not given back, or cannot use again.
    Allocator,
}

impl Category {
    /// All of them, in the order of a table.
    pub const ALL: [Self; 13] = [
        Self::Weights,
        Self::Masters,
        Self::Gradients,
        Self::Moments,
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

    /// Its name in a table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::Masters => "master weights",
            Self::Gradients => "gradients",
            Self::Moments => "optimizer moments",
            Self::Activations => "kept activations",
            Self::Block => "the block at work",
            Self::Logits => "logits",
            Self::Transfer => "in transfer",
            Self::Exchange => "between ranks",
            Self::Cache => "keys and values",
            Self::Copy => "copy to save",
            Self::Program => "program",
            Self::Allocator => "allocator's slack",
        }
    }
}

/// Bytes by category. A category that is not there has none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct MemoryBreakdown(BTreeMap<Category, u64>);

impl MemoryBreakdown {
    /// The same with `bytes` more of a category.
    #[must_use]
    pub fn with(mut self, category: Category, bytes: u64) -> Self {
        if bytes > 0 {
            *self.0.entry(category).or_default() += bytes;
        }
        self
    }

    /// The sum of two accounts.
    #[must_use]
    pub fn plus(self, other: &Self) -> Self {
        other.0.iter().fold(self, |sum, (category, bytes)| sum.with(*category, *bytes))
    }

    /// The bytes of a category.
    pub fn of(&self, category: Category) -> u64 {
        self.0.get(&category).copied().unwrap_or(0)
    }

    /// The bytes of all categories.
    pub fn total(&self) -> u64 {
        self.0.values().sum()
    }
}

/// Writes bytes in the unit that fits: `512 B`, `37.5 MiB`, `1.25 GiB`.
pub fn bytes(n: u64) -> String {
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
            assert_eq!(bytes(n), want);
        }
    }
}
