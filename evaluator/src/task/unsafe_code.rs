//! Permission to run programs that the model wrote.

/// Permission to run programs that the model wrote.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnsafeCodePolicy {
    /// Runs no program.
    #[default]
    Refuse,
    /// Runs programs if the kernel confines their writes to their own folder.
    RunConfined,
    /// Runs programs even if they can write to all files of the user.
    RunUnconfined,
}

/// The options `--confirm-run-unsafe-code` and `--allow-unconfined-code`.
#[derive(Clone, Copy, Debug)]
pub struct UnsafeCodeOptions {
    /// True to run model-written code.
    pub confirm_run_unsafe_code: bool,
    /// True to run it even if the machine cannot confine it.
    pub allow_unconfined_code: bool,
}

impl UnsafeCodePolicy {
    /// Reason and remedy of [`UnsafeCodePolicy::Refuse`].
    pub(crate) const REFUSED: &str = "it runs model-written code; allow it with --confirm-run-unsafe-code \
                                      (eval.confirm_run_unsafe_code: true in a recipe)";
    /// Reason and remedy if [`UnsafeCodePolicy::RunConfined`] is not possible.
    pub(crate) const UNCONFINED: &str = "this machine cannot confine model-written code: it could change and delete all your files. Use a machine with user \
         namespaces (Linux 5.12) or Landlock (Linux 6.2), or a container, or allow it with --allow-unconfined-code \
         (eval.allow_unconfined_code: true in a recipe)";
}

impl From<UnsafeCodeOptions> for UnsafeCodePolicy {
    fn from(options: UnsafeCodeOptions) -> Self {
        match options {
            UnsafeCodeOptions { confirm_run_unsafe_code: false, .. } => Self::Refuse,
            UnsafeCodeOptions { allow_unconfined_code: false, .. } => Self::RunConfined,
            UnsafeCodeOptions { .. } => Self::RunUnconfined,
        }
    }
}
