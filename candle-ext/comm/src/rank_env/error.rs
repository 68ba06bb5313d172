//! Errors of environment variables that contradict each other.

use super::launcher::Launcher;

/// Error of environment variables from which no rank can be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RankEnvError {
    /// One variable is set and its companion is not.
    #[error("read the rank: {present} is set but {absent} is not")]
    Missing {
        /// Variable that is set.
        present: &'static str,
        /// Variable that is not set.
        absent: &'static str,
    },
    /// A variable is not a number.
    #[error("read the rank: {name}={value} is not a number{bound}")]
    NotANumber {
        /// Name of the variable.
        name: &'static str,
        /// Value of the variable.
        value: String,
        /// Largest allowed value, as text.
        bound: &'static str,
    },
    /// A rank is not less than the number of ranks.
    #[error("read the rank: {smaller_name}={smaller} must be less than {larger_name}={larger}")]
    NotBelow {
        /// Variable that is too large.
        smaller_name: &'static str,
        /// Value of that variable.
        smaller: usize,
        /// Variable that bounds it.
        larger_name: &'static str,
        /// Value of the bound.
        larger: usize,
    },
    /// The node has more ranks than the job.
    #[error("read the rank: {local_name}={local} is more than {all_name}={all}")]
    TooMany {
        /// Variable of the node.
        local_name: &'static str,
        /// Value of that variable.
        local: usize,
        /// Variable of the job.
        all_name: &'static str,
        /// Value of that variable.
        all: usize,
    },
    /// The job runs on several nodes and no variable names the node of rank 0.
    #[error("find the node of rank 0: {launcher_name} does not export it; set MASTER_ADDR{hint}")]
    NoMaster {
        /// Launcher of the process.
        launcher_name: Launcher,
        /// Command line option that sets it.
        hint: &'static str,
    },
    /// Slurm's list of hosts cannot be parsed.
    #[error("find the node of rank 0: {name}={value} is not a list of hosts")]
    NodeList {
        /// Name of the variable.
        name: &'static str,
        /// Value of the variable.
        value: String,
    },
}
