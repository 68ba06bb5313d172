//! The output of `--dry-run`: every worker of this node as a shell command.

use crate::generation::{Generation, Participant};
use crate::log_dir::AttemptLogDir;
use crate::node_resources::NodeResources;
use crate::plan::{LaunchPlan, RendezvousPlan};
use crate::worker_group::{WorkerGroupSpec, worker_spec};
use candlewick_comm::rank_env::Master;

/// Returns the environment variables and the command of each worker. Other nodes are assumed to equal this one.
pub fn text(plan: &LaunchPlan, node_resources: &NodeResources) -> String {
    let generation = assumed_generation(plan, node_resources);
    let logs = AttemptLogDir::for_dry_run(&plan.output, &plan.run_id);
    let spec = WorkerGroupSpec {
        plan,
        generation: &generation,
        restart: 0,
        logs: &logs,
        hostname: &node_resources.hostname,
        variables: &node_resources.variables,
    };
    let mut text = format!(
        "# node {} of {}, {} {}, {}\n",
        generation.group_rank,
        generation.participants.len(),
        plan.local_world_size,
        if plan.local_world_size == 1 { "worker" } else { "workers" },
        store_description(plan)
    );
    for local_rank in 0..plan.local_world_size {
        let worker = worker_spec(&spec, local_rank);
        let variables = worker.variables.iter().map(|(name, value)| format!("{name}={}", quoted(value)));
        let command = worker.command.iter().map(|word| quoted(word));
        text +=
            &format!("# rank {}\nenv {} \\\n", generation.rank(local_rank), variables.collect::<Vec<_>>().join(" "));
        text += &format!("  {}\n", command.collect::<Vec<_>>().join(" "));
    }
    text
}

fn assumed_generation(plan: &LaunchPlan, node_resources: &NodeResources) -> Generation {
    let (endpoint, group_rank) = match &plan.rendezvous {
        RendezvousPlan::Static { master, node_rank, .. } => (master, *node_rank),
        RendezvousPlan::Dynamic(dynamic) => (&dynamic.endpoint, 0),
    };
    let participant = Participant {
        host: node_resources.hostname.clone(),
        n_workers: plan.local_world_size,
        role: plan.role.clone(),
    };
    let master = Master { addr: endpoint.host.clone(), port: endpoint.port, agent_hosts_store: true };
    Generation { number: 0, group_rank, participants: vec![participant; plan.nodes.max], master, store_secret: None }
}

fn store_description(plan: &LaunchPlan) -> String {
    match &plan.rendezvous {
        RendezvousPlan::Static { master, .. } => format!("static, store at {master}"),
        RendezvousPlan::Dynamic(dynamic) if dynamic.endpoint.port == 0 => "c10d, store at a free port".into(),
        RendezvousPlan::Dynamic(dynamic) => format!("c10d, store at {}", dynamic.endpoint),
    }
}

fn quoted(word: &str) -> String {
    // Quoting fails for a NUL byte only, which a command line cannot contain.
    shlex::try_quote(word).map_or_else(|_| word.to_owned(), |word| word.into_owned())
}
