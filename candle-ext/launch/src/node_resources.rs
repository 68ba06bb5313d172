//! The resources of this node: cores, GPUs, host name and environment.

use std::path::Path;

use candlewick_comm::rank_env::Variables;

/// The resources of a node and the launcher's environment.
#[derive(Clone, Debug)]
pub struct NodeResources {
    /// Number of cores available to this process.
    pub n_cores: usize,
    /// Number of GPUs visible to CUDA.
    pub n_gpus: usize,
    /// Host name.
    pub hostname: String,
    /// Environment variables of the launcher.
    pub variables: Variables,
}

impl NodeResources {
    /// Reads the resources of this node. `variables` is the environment of this process.
    pub fn local(variables: Variables) -> Self {
        let n_gpus = visible_gpus(variables.get("CUDA_VISIBLE_DEVICES").map(String::as_str), installed_gpus());
        let n_cores = std::thread::available_parallelism().map_or(1, usize::from);
        let hostname = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Self { n_cores, n_gpus, hostname, variables }
    }
}

/// Returns the number of devices visible to CUDA: all without the variable, else the listed ones before the first
/// unknown one.
fn visible_gpus(variable: Option<&str>, installed: usize) -> usize {
    let Some(list) = variable else { return installed };
    let is_known = |device: &&str| match device.parse::<usize>() {
        Ok(number) => number < installed,
        Err(_) => device.starts_with("GPU-") || device.starts_with("MIG-"),
    };
    list.split(',').map(str::trim).take_while(is_known).count()
}

/// Returns the number of GPUs that NVML reports, or 0 without a driver. NVML sees only the GPUs of its container.
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
    fn cuda_visible_devices_hides_gpus() {
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
