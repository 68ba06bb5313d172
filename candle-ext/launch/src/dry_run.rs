//! What would run: every worker of this node as a line for a shell.

use crate::generation::{Generation, Participant};
use crate::host::Host;
use crate::logs::AttemptLogs;
use crate::plan::{Plan, RendezvousPlan};
use crate::worker_group::{Setting, start_of};
use candlewick_comm::rank_env::Master;

/// Returns the workers' variables and commands. What only the other nodes know is assumed: that they are like this one.
pub fn text(plan: &Plan, host: &Host) -> String {
    let generation = imagined_generation(plan, host);
    let logs = AttemptLogs::imagined(&plan.output, &plan.run_id);
    let setting = Setting {
        plan,
        generation: &generation,
        restart: 0,
        logs: &logs,
        host: &host.name,
        variables: &host.variables,
    };
    let mut text = format!(
        "# node {} of {}, {} workers, {}\n",
        generation.group_rank,
        generation.participants.len(),
        plan.local_world_size,
        meeting_point(plan)
    );
    for local_rank in 0..plan.local_world_size {
        let start = start_of(&setting, local_rank);
        let variables = start.variables.iter().map(|(name, value)| format!("{name}={}", quoted(value)));
        let command = start.command.iter().map(|word| quoted(word));
        text +=
            &format!("# rank {}\nenv {} \\\n", generation.rank(local_rank), variables.collect::<Vec<_>>().join(" "));
        text += &format!("  {}\n", command.collect::<Vec<_>>().join(" "));
    }
    text
}

fn imagined_generation(plan: &Plan, host: &Host) -> Generation {
    let (endpoint, group_rank) = match &plan.rendezvous {
        RendezvousPlan::Static { master, node_rank, .. } => (master, *node_rank),
        RendezvousPlan::Dynamic(dynamic) => (&dynamic.endpoint, 0),
    };
    let participant =
        Participant { host: host.name.clone(), n_workers: plan.local_world_size, role: plan.role.clone() };
    let master = Master { addr: endpoint.host.clone(), port: endpoint.port, agent_hosts_store: true };
    Generation { number: 0, group_rank, participants: vec![participant; plan.nodes.max], master }
}

fn meeting_point(plan: &Plan) -> String {
    match &plan.rendezvous {
        RendezvousPlan::Static { master, .. } => format!("static, store at {master}"),
        RendezvousPlan::Dynamic(dynamic) if dynamic.endpoint.port == 0 => "c10d, store at a free port".into(),
        RendezvousPlan::Dynamic(dynamic) => format!("c10d, store at {}", dynamic.endpoint),
    }
}

fn quoted(word: &str) -> String {
    // A word with a zero byte cannot be on a command line.
    shlex::try_quote(word).map_or_else(|_| word.to_owned(), |word| word.into_owned())
}
