//! Positions in gradient accumulation.

/// Position of a micro-batch in gradient accumulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MicroBatch {
    /// A micro-batch that is followed by another one of the step.
    Earlier,
    /// The last micro-batch of the step.
    Last,
}
