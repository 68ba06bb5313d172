//! What a machine has that decides how many workers it starts: cores, GPUs, a name.

use std::path::Path;

use candlewick_comm::rank_env::Variables;

/// A machine and the variables of the launcher's own process.
#[derive(Clone, Debug)]
pub struct Host {
    /// Cores that this process may use.
    pub n_cores: usize,
    /// GPUs that CUDA would show.
    pub n_gpus: usize,
    /// The machine's name.
    pub name: String,
    /// The variables of this process.
    pub variables: Variables,
}

impl Host {
    /// Looks at this machine. `variables` are those of this process.
    pub fn this(variables: Variables) -> Self {
        let n_gpus = visible_gpus(variables.get("CUDA_VISIBLE_DEVICES").map(String::as_str), installed_gpus());
        let n_cores = std::thread::available_parallelism().map_or(1, usize::from);
        let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Self { n_cores, n_gpus, name, variables }
    }
}

/// CUDA shows the devices that the variable names up to the first it does not know, and all if there is no variable.
fn visible_gpus(variable: Option<&str>, installed: usize) -> usize {
    let Some(list) = variable else { return installed };
    let is_known = |name: &&str| match name.parse::<usize>() {
        Ok(number) => number < installed,
        Err(_) => name.starts_with("GPU-") || name.starts_with("MIG-"),
    };
    list.split(',').map(str::trim).take_while(is_known).count()
}

/// NVIDIA's library knows which GPUs a container was given. It is not asked where there is no driver.
fn installed_gpus() -> usize {
    if !Path::new("/dev/nvidiactl").exists() {
        return 0;
    }
    let count = nvml_wrapper::Nvml::init().and_then(|nvml| nvml.device_count());
    count.map_or(0, |count| count as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_hides_gpus() {
        for (variable, want) in [
            (None, 4),
            (Some(""), 0),
            (Some("-1"), 0),
            (Some("0,2"), 2),
            (Some("1, 3"), 2),
            (Some("0,9,1"), 1),
            (Some("GPU-1b2c,MIG-3d"), 2),
            (Some("NoDevFiles"), 0),
        ] {
            assert_eq!(visible_gpus(variable, 4), want, "{variable:?}");
        }
    }
}
