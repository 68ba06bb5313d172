//! Declarations of a kind of optimizer, and the interface of its updates.

use std::fmt::Debug;
use std::sync::Arc;

use candle_core::{Result, Tensor, bail};
use candlewick_ops::{GradScaler, StochasticRounding};

use super::hyperparameter::Hyperparameter;

/// A kind of optimizer before its hyperparameters are known.
#[derive(Debug)]
pub struct KindDeclaration {
    /// Name in errors and plans.
    pub name: &'static str,
    /// Names in recipes, those of other toolkits included.
    pub recipe_names: &'static [&'static str],
    /// Hyperparameters other than learning rate and weight decay, by the key of the recipe.
    pub hyperparameters: &'static [Hyperparameter],
    /// Creates the kind from the numbers of each of `hyperparameters`, in their order.
    pub(super) build: fn(&[&[f64]]) -> Arc<dyn OptimizerKind>,
}

impl KindDeclaration {
    /// Returns the kind with these hyperparameters by name, and defaults for the others. The error completes "failed to ...".
    pub fn with(&self, given: &[(&str, &[f64])]) -> Result<Arc<dyn OptimizerKind>> {
        if let Some((name, _)) = given.iter().find(|(name, _)| self.hyperparameters.iter().all(|it| it.name != *name)) {
            bail!("build {}: it has no hyperparameter {name}", self.name)
        }
        let mut values = Vec::new();
        for hyperparameter in self.hyperparameters {
            let own = given.iter().find(|(name, _)| *name == hyperparameter.name).map(|(_, numbers)| *numbers);
            let numbers = own.unwrap_or(hyperparameter.default);
            if let Err(problem) = hyperparameter.check(numbers) {
                bail!("build {}: {}: {problem}", self.name, hyperparameter.name)
            }
            values.push(numbers);
        }
        Ok((self.build)(&values))
    }

    /// Returns the kind with the default of each hyperparameter.
    pub fn with_defaults(&self) -> Arc<dyn OptimizerKind> {
        let defaults: Vec<&[f64]> = self.hyperparameters.iter().map(|it| it.default).collect();
        (self.build)(&defaults)
    }
}

/// A kind of optimizer with its hyperparameters.
pub trait OptimizerKind: Debug + Send + Sync {
    /// Returns the name, that of the kind's [`KindDeclaration`].
    fn name(&self) -> &'static str;

    /// Returns the hyperparameters as a plan prints them and a checkpoint compares them.
    fn settings(&self) -> Vec<(&'static str, f64)>;

    /// Returns the tensors of state per parameter, each in the parameter's shape. All parameters have the same.
    fn slots(&self) -> &'static [StateSlot];

    /// Returns the part of a parameter that one update needs.
    fn need(&self) -> UpdateNeed;

    /// Returns true if updates honour [`ShardUpdate::rounding`].
    fn rounds_stochastically(&self) -> bool {
        false
    }

    /// Returns the kind with hyperparameters under which updates differ little if gradients do, to compare meshes.
    fn for_comparison(&self) -> Arc<dyn OptimizerKind>;

    /// Starts the step that `scaler` has decided on, on the scaler's device and without a wait. Numbers that all updates share,
    /// such as bias corrections, are computed here. An update that the scaler skips must change nothing.
    fn start_step<'s>(&'s self, scaler: &'s GradScaler) -> Result<StepUpdates<'s>>;
}

/// Updates of one step.
pub enum StepUpdates<'s> {
    /// Updates of elements, for [`UpdateNeed::Elements`].
    Elements(Box<dyn ElementUpdates + 's>),
    /// Updates of matrices, for [`UpdateNeed::WholeMatrices`].
    WholeMatrices(Box<dyn MatrixUpdates + 's>),
}

/// Updates of elements.
pub trait ElementUpdates {
    /// Updates weights and states in place.
    fn update(&self, shard: &ShardUpdate<'_>) -> Result<()>;
}

/// Updates of whole matrices, of which each tensor parallel rank holds a slice. The store gathers the slices between the calls.
pub trait MatrixUpdates {
    /// Updates the states of a slice, and returns the slice of the matrix from which the step is computed, flat f32.
    fn gathered(&self, slice: &ShardUpdate<'_>) -> Result<Tensor>;

    /// Returns the step of a whole matrix, f32 [rows, columns], on the device that computes. All tensor parallel ranks compute it.
    fn step(&self, whole: &Tensor) -> Result<Tensor>;

    /// Updates the weights by the slice's part of the step, flat f32.
    fn apply(&self, slice: &ShardUpdate<'_>, step: &Tensor) -> Result<()>;
}

/// A tensor of optimizer state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateSlot {
    /// Name in checkpoints.
    pub name: &'static str,
    /// Dtype.
    pub dtype: SlotDtype,
}

/// Dtype of a state slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotDtype {
    /// The configured dtype of optimizer states: f32 or bf16.
    Configured,
    /// f32, for a state that bf16 would spoil.
    F32,
}

/// Part of a parameter that one update needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpdateNeed {
    /// Any elements: a shard of a flat buffer, across the borders of parameters.
    Elements,
    /// A whole matrix: ZeRO gives each rank whole ones, and tensor parallel slices are gathered.
    WholeMatrices,
}

/// Tensors and settings of one update: flat views of equal length, each in a buffer of its own.
#[derive(Debug)]
pub struct ShardUpdate<'a> {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decoupled weight decay: the parameter shrinks by lr * weight_decay.
    pub weight_decay: f64,
    /// Master weights, f32 or bf16.
    pub master: &'a Tensor,
    /// Gradient in the dtype of `master`, before unscaling and clipping by [`GradScaler::grad_scale`].
    pub grad: &'a Tensor,
    /// State in the order of [`OptimizerKind::slots`].
    pub slots: &'a [Tensor],
    /// Copy of the weights in the compute dtype, to be rewritten; `None` if ops read `master`.
    pub compute: Option<&'a Tensor>,
    /// Stochastic rounding of `master`; `None` to round to the nearest number.
    pub rounding: Option<StochasticRounding>,
}
