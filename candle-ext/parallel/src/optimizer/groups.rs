//! Groups of parameters by name, each with a kind of optimizer, a learning rate and a weight decay.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use candlewick_model::{ParamGroupKind, ParamSpec};
use fancy_regex::Regex;

use super::OPTIMIZER_KINDS;
use super::kind::{OptimizerKind, UpdateNeed};

/// Optimizer of all trainable parameters: groups, of which the first that matches a parameter updates it.
#[derive(Clone, Debug)]
pub struct OptimizerGroups {
    /// Groups by pattern, then the group of all other parameters.
    groups: Vec<OptimizerGroup>,
}

/// Parameters that one kind of optimizer updates with one learning rate.
#[derive(Clone, Debug)]
pub struct OptimizerGroup {
    /// Parameters; `None` for those that no earlier group matches.
    pub pattern: Option<ParamPattern>,
    /// Kind of optimizer.
    pub kind: Arc<dyn OptimizerKind>,
    /// Factor on the learning rate of the step.
    pub lr_factor: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Parameters of the group that the weight decay applies to.
    pub decayed: DecayedParams,
}

/// Parameters that weight decay applies to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecayedParams {
    /// Matrices; not norms and biases.
    Matrices,
    /// All parameters of the group.
    All,
}

/// A regular expression that is searched in the names of parameters, as Python's `re.search`.
#[derive(Clone)]
pub struct ParamPattern(Regex);

/// Parameters that the groups cannot update.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupsError {
    /// Index of the group.
    pub group_idx: usize,
    /// Problem and remedy.
    pub problem: String,
}

impl fmt::Display for GroupsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.problem)
    }
}

impl std::error::Error for GroupsError {}

impl ParamPattern {
    /// Parses a regular expression. The error is the reason why it is none.
    pub fn parse(pattern: &str) -> Result<Self, String> {
        Regex::new(pattern).map(Self).map_err(|error| error.to_string())
    }

    /// Returns true if the pattern occurs in `name`. The error is the reason why the search ended, such as too many steps back.
    pub fn search(&self, name: &str) -> Result<bool, String> {
        self.0.is_match(name).map_err(|error| error.to_string())
    }

    /// Returns the regular expression.
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }
}

impl fmt::Debug for ParamPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

impl OptimizerGroup {
    /// Returns the group of all parameters, whose matrices have weight decay.
    pub fn of_all(kind: Arc<dyn OptimizerKind>, weight_decay: f64) -> Self {
        Self { pattern: None, kind, lr_factor: 1.0, weight_decay, decayed: DecayedParams::Matrices }
    }

    /// Returns the weight decay of a parameter of the group.
    fn weight_decay(&self, spec: &ParamSpec) -> f64 {
        if self.decayed == DecayedParams::All || spec.decay { self.weight_decay } else { 0.0 }
    }

    /// Returns true if the group has this parameter. [`OptimizerGroups::check_kinds`] has refused searches that fail.
    fn matches(&self, spec: &ParamSpec) -> bool {
        self.pattern.as_ref().is_none_or(|pattern| pattern.search(&spec.name).unwrap_or(false))
    }
}

/// The default kind without weight decay.
impl Default for OptimizerGroups {
    fn default() -> Self {
        Self::of_all(OPTIMIZER_KINDS[0].with_defaults(), 0.0)
    }
}

impl OptimizerGroups {
    /// Creates groups of parameters by pattern, and the group of all others.
    pub fn new(by_pattern: Vec<OptimizerGroup>, others: OptimizerGroup) -> Self {
        Self { groups: by_pattern.into_iter().chain([OptimizerGroup { pattern: None, ..others }]).collect() }
    }

    /// Creates one group of all parameters, whose matrices have weight decay.
    pub fn of_all(kind: Arc<dyn OptimizerKind>, weight_decay: f64) -> Self {
        Self::new(Vec::new(), OptimizerGroup::of_all(kind, weight_decay))
    }

    /// Returns the groups with hyperparameters for a comparison of meshes, see [`OptimizerKind::for_comparison`], and without
    /// weight decay.
    #[must_use]
    pub fn for_comparison(&self) -> Self {
        let of_group = |group: &OptimizerGroup| OptimizerGroup {
            kind: group.kind.for_comparison(),
            weight_decay: 0.0,
            ..group.clone()
        };
        Self { groups: self.groups.iter().map(of_group).collect() }
    }

    /// Returns the groups. The last one has no pattern.
    pub fn groups(&self) -> &[OptimizerGroup] {
        &self.groups
    }

    /// Returns the index of a parameter's group.
    pub fn index_of(&self, spec: &ParamSpec) -> usize {
        let first = self.groups.iter().position(|group| group.matches(spec));
        first.unwrap_or(self.groups.len() - 1)
    }

    /// Returns the group of a parameter.
    pub fn group_of(&self, spec: &ParamSpec) -> &OptimizerGroup {
        &self.groups[self.index_of(spec)]
    }

    /// Returns the weight decay of a parameter.
    pub fn weight_decay(&self, spec: &ParamSpec) -> f64 {
        self.group_of(spec).weight_decay(spec)
    }

    /// Checks that each pattern can be searched in the names, and that each kind can update its parameters.
    pub fn check_kinds<'p>(&self, trainable: impl Iterator<Item = &'p ParamSpec>) -> Result<(), GroupsError> {
        for spec in trainable {
            self.check_search(spec)?;
            let group_idx = self.index_of(spec);
            let kind = &*self.groups[group_idx].kind;
            if kind.need() == UpdateNeed::WholeMatrices
                && let Some(problem) = refusal(kind, spec)
            {
                return Err(GroupsError { group_idx, problem });
            }
        }
        Ok(())
    }

    fn check_search(&self, spec: &ParamSpec) -> Result<(), GroupsError> {
        let patterns = self.groups.iter().enumerate().filter_map(|(i, group)| Some((i, group.pattern.as_ref()?)));
        for (group_idx, pattern) in patterns {
            if let Err(reason) = pattern.search(&spec.name) {
                let problem = format!("failed to search {:?} in {}: {reason}", pattern.as_str(), spec.name);
                return Err(GroupsError { group_idx, problem });
            }
        }
        Ok(())
    }

    /// Checks that each pattern selects a parameter that no earlier group has.
    pub fn check_patterns<'p>(&self, trainable: impl Iterator<Item = &'p ParamSpec>) -> Result<(), GroupsError> {
        let used: BTreeSet<usize> = trainable.map(|spec| self.index_of(spec)).collect();
        let patterns = self.groups.iter().enumerate().filter_map(|(i, group)| Some((i, group.pattern.as_ref()?)));
        match patterns.into_iter().find(|(group_idx, _)| !used.contains(group_idx)) {
            None => Ok(()),
            Some((group_idx, pattern)) => {
                let problem = format!(
                    "no trained parameter that an earlier group leaves has a name with the pattern {:?}",
                    pattern.as_str()
                );
                Err(GroupsError { group_idx, problem })
            }
        }
    }
}

/// Returns the reason why a kind that needs whole matrices cannot update a parameter.
fn refusal(kind: &dyn OptimizerKind, spec: &ParamSpec) -> Option<String> {
    let (kind, name) = (kind.name(), &spec.name);
    let why = if spec.group == ParamGroupKind::Expert {
        "holds the matrices of all experts"
    } else if spec.shape.len() != 2 {
        "is a vector"
    } else {
        return None;
    };
    Some(format!("{kind} updates matrices, and {name} {why}; select it by an earlier group with another optimizer"))
}
