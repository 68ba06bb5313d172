//! `trainer doctor`: the CPU, GPUs, libraries, disks and Hub access of this machine.

use std::net::{TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use candle_core::DType;
use candlewick_ops::{
    AttentionChoice, AttentionHeads, AttentionPasses, DeviceChoice, GpuInfo, GroupedGemmImpl, ModelAttention,
    NvidiaLibrary, cpu_gemm_kernel, cpu_gemm_kernels, gpu_unavailable_reason, gpus, nvidia_libraries,
};
use candlewick_text::hub::HubSettings;
use serde::Serialize;

use super::Ui;
use super::options::OutputFormat;
use crate::checkpoint::free_bytes;
use crate::exit::ExitCode;
use crate::metrics::{HostInfo, Versions, quantity};

#[derive(Serialize)]
struct DoctorReport {
    versions: Versions,
    host: HostInfo,
    /// SIMD instruction sets that have kernels.
    cpu_features: Vec<&'static str>,
    /// The GEMM kernel in use on the CPU.
    #[serde(rename = "cpu_product")]
    gemm_kernel: &'static str,
    /// The GEMM kernels that this CPU supports, fastest first. CANDLEWICK_CPU_GEMM selects one.
    #[serde(rename = "cpu_products")]
    gemm_kernels: Vec<&'static str>,
    gpus: Vec<GpuInfo>,
    /// The reason that no GPU is usable.
    no_gpu: Option<String>,
    libraries: Vec<NvidiaLibrary>,
    /// The kernel that `attn_implementation: auto` selects.
    attention: String,
    /// The implementation of experts that `experts_implementation: auto` selects.
    experts: String,
    hub: HubState,
    disks: Vec<Disk>,
}

#[derive(Serialize)]
struct HubState {
    endpoint: String,
    is_offline: bool,
    has_token: bool,
    /// True if the Hub accepts connections; `None` if the network is disabled.
    is_reachable: Option<bool>,
    cache: PathBuf,
}

#[derive(Serialize)]
struct Disk {
    what: &'static str,
    path: PathBuf,
    free_bytes: Option<u64>,
}

pub(super) fn run(format: OutputFormat, ui: &Ui) -> Result<ExitCode> {
    let report = DoctorReport::now();
    match format {
        OutputFormat::Json => ui.print(&serde_json::to_string_pretty(&report).context("failed to write JSON")?),
        OutputFormat::Text => ui.print(&report.table()),
    }
}

impl DoctorReport {
    fn now() -> Self {
        let hub = HubState::now();
        let disk = |what, path: &Path| Disk { what, path: path.to_owned(), free_bytes: free_bytes_at(path) };
        let disks =
            vec![disk("here", Path::new(".")), disk("Hub cache", &hub.cache), disk("temporary", &std::env::temp_dir())];
        Self {
            versions: Versions::this(),
            host: HostInfo::this(),
            cpu_features: cpu_features(),
            gemm_kernel: cpu_gemm_kernel(),
            gemm_kernels: cpu_gemm_kernels(),
            gpus: gpus(),
            no_gpu: gpu_unavailable_reason(),
            libraries: nvidia_libraries(),
            attention: attention(),
            experts: experts(),
            hub,
            disks,
        }
    }

    fn table(&self) -> String {
        let mut rows = vec![
            ("version".to_owned(), self.versions.to_string()),
            ("system".to_owned(), self.host.system.clone()),
            ("processor".to_owned(), self.host.cpu.clone().unwrap_or_else(|| "unknown".into())),
            ("threads".to_owned(), self.host.n_cpus.to_string()),
            ("instructions".to_owned(), self.cpu_features.join(" ")),
            ("GEMM".to_owned(), self.gemm_kernel.to_owned()),
            ("memory".to_owned(), self.host.memory_bytes.map_or("unknown".into(), format_bytes)),
        ];
        for gpu in &self.gpus {
            let GpuInfo { ordinal, name, capability, memory_bytes } = gpu;
            rows.push((format!("cuda:{ordinal}"), format!("{name}, sm_{capability}, {}", format_bytes(*memory_bytes))));
        }
        rows.extend(self.no_gpu.clone().map(|why| ("no GPU".to_owned(), why)));
        for library in &self.libraries {
            let found = library.path.as_ref().map_or("not found".into(), |path| path.display().to_string());
            rows.push((library.name.to_owned(), found));
        }
        rows.push(("attention".to_owned(), self.attention.clone()));
        rows.push(("experts".to_owned(), self.experts.clone()));
        rows.push(("Hub".to_owned(), self.hub.describe()));
        for Disk { what, path, free_bytes } in &self.disks {
            let free = free_bytes.map_or("unknown".into(), format_bytes);
            rows.push((format!("disk, {what}"), format!("{free} free at {}", path.display())));
        }
        let lines = rows.into_iter().map(|(what, found)| format!("{what:<16}  {found}"));
        lines.collect::<Vec<_>>().join("\n")
    }
}

impl HubState {
    fn now() -> Self {
        let settings = HubSettings::from_env();
        let is_reachable = (!settings.offline).then(|| is_reachable(&settings.endpoint));
        Self {
            endpoint: settings.endpoint,
            is_offline: settings.offline,
            has_token: settings.token.is_some(),
            is_reachable,
            cache: settings.cache,
        }
    }

    fn describe(&self) -> String {
        let reach = match self.is_reachable {
            None => "not checked (HF_HUB_OFFLINE)",
            Some(true) => "reachable",
            Some(false) => "unreachable",
        };
        let token = if self.has_token { "with a token" } else { "without a token" };
        format!("{} {reach}, {token}, cache {}", self.endpoint, self.cache.display())
    }
}

/// Returns true if a server listens at an address such as https://huggingface.co.
fn is_reachable(endpoint: &str) -> bool {
    const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
    let (scheme, rest) = endpoint.split_once("://").unwrap_or(("https", endpoint));
    let host = rest.split('/').next().unwrap_or(rest);
    let port = if scheme == "http" { 80 } else { 443 };
    let address = if host.contains(':') { host.to_owned() } else { format!("{host}:{port}") };
    let Ok(mut addresses) = address.to_socket_addrs() else { return false };
    addresses.any(|address| TcpStream::connect_timeout(&address, CONNECT_TIMEOUT).is_ok())
}

/// Returns the attention kernel for a typical bf16 model (32 query heads, 8 KV heads, head dim 128).
fn attention() -> String {
    let heads = AttentionHeads { n_query: 32, n_kv: 8, dim: 128 };
    let model = ModelAttention { heads, window: None, max_tokens: 4096 };
    let explain = |device| AttentionChoice::default().explain(&device, DType::BF16, model, AttentionPasses::Both);
    match DeviceChoice::Auto.open().and_then(explain) {
        Ok(note) => note.map_or("fused".into(), |note| note.trim_start_matches("attention: ").to_owned()),
        Err(error) => format!("{error}"),
    }
}

/// Returns the implementation of experts for a typical bf16 model (hidden size 2048, experts of 768).
fn experts() -> String {
    let explain = |device| GroupedGemmImpl::Auto.explain(&device, DType::BF16, [2048, 768]);
    match DeviceChoice::Auto.open().and_then(explain) {
        Ok(note) => note.map_or("fused".into(), |note| note.trim_start_matches("experts: ").to_owned()),
        Err(error) => format!("{error}"),
    }
}

/// Returns the free bytes of the disk that holds a folder, or its nearest existing parent.
fn free_bytes_at(path: &Path) -> Option<u64> {
    path.ancestors().find(|folder| folder.exists()).and_then(|folder| free_bytes(folder).ok())
}

fn format_bytes(n: u64) -> String {
    format!("{}B", quantity(n as f64))
}

#[cfg(target_arch = "x86_64")]
fn cpu_features() -> Vec<&'static str> {
    let known = [
        ("sse4.2", is_x86_feature_detected!("sse4.2")),
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bf16", is_x86_feature_detected!("avx512bf16")),
    ];
    known.into_iter().filter(|(_, is_there)| *is_there).map(|(name, _)| name).collect()
}

#[cfg(not(target_arch = "x86_64"))]
fn cpu_features() -> Vec<&'static str> {
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_listening_port_is_reachable() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0");
        let address = listener.as_ref().ok().and_then(|listener| listener.local_addr().ok());
        let endpoint = address.map(|address| format!("http://{address}/api")).unwrap_or_default();
        assert!(is_reachable(&endpoint), "{endpoint}");
        drop(listener);
        assert!(!is_reachable(&endpoint), "{endpoint}");
        assert!(!is_reachable("http://no.such.host.invalid"));
    }

    #[test]
    fn the_table_has_a_line_for_each_field() {
        let text = DoctorReport::now().table();
        for what in ["version", "processor", "GEMM", "threads", "memory", "attention", "Hub", "disk, here"] {
            assert!(text.lines().any(|line| line.starts_with(what)), "no {what} in:\n{text}");
        }
    }
}
