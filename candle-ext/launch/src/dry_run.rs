//! What would run: every worker of this node as a line for a shell.

use crate::group::{Setting, start_of};
use crate::host::Host;
use crate::logs::AttemptLogs;
use crate::plan::{Plan, Rendezvous};
use crate::round::{Member, Round};
use candlewick_comm::place::Master;

/// Returns the workers' variables and commands. What only the other nodes know is assumed: that they are like this one.
pub fn text(plan: &Plan, host: &Host) -> String {
    let round = imagined_round(plan, host);
    let logs = AttemptLogs::imagined(&plan.output, &plan.run_id);
    let setting = Setting {
        plan,
        round: &round,
        attempt: 0,
        restart: 0,
        logs: &logs,
        host: &host.name,
        variables: &host.variables,
    };
    let mut text = format!(
        "# node {} of {}, {} workers, {}\n",
        round.group_rank,
        round.members.len(),
        plan.local_world_size,
        meeting_point(plan)
    );
    for local_rank in 0..plan.local_world_size {
        let start = start_of(&setting, local_rank);
        let variables = start.variables.iter().map(|(name, value)| format!("{name}={}", quoted(value)));
        let command = start.command.iter().map(|word| quoted(word));
        text += &format!("# rank {}\nenv {} \\\n", round.rank(local_rank), variables.collect::<Vec<_>>().join(" "));
        text += &format!("  {}\n", command.collect::<Vec<_>>().join(" "));
    }
    text
}

fn imagined_round(plan: &Plan, host: &Host) -> Round {
    let (endpoint, group_rank) = match &plan.rendezvous {
        Rendezvous::Static { master, node_rank, .. } => (master, *node_rank),
        Rendezvous::Dynamic(dynamic) => (&dynamic.endpoint, 0),
    };
    let member = Member { host: host.name.clone(), n_workers: plan.local_world_size, role: plan.role.clone() };
    let master = Master { addr: endpoint.host.clone(), port: endpoint.port, agent_hosts_store: true };
    Round { group_rank, members: vec![member; plan.nodes.max], master }
}

fn meeting_point(plan: &Plan) -> String {
    match &plan.rendezvous {
        Rendezvous::Static { master, .. } => format!("static, store at {master}"),
        Rendezvous::Dynamic(dynamic) if dynamic.endpoint.port == 0 => "c10d, store at a free port".into(),
        Rendezvous::Dynamic(dynamic) => format!("c10d, store at {}", dynamic.endpoint),
    }
}

fn quoted(word: &str) -> String {
    // A word with a zero byte cannot be on a command line.
    shlex::try_quote(word).map_or_else(|_| word.to_owned(), |word| word.into_owned())
}
