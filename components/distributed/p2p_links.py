"""
Links between ranks for point-to-point transfers.

Connecting a link is a rendezvous between its two ranks on the host. Different connection orders deadlock
(pytorch#108378, nccl#783), so all ranks follow one order of rounds, and a rank has at most one peer per round.
"""

from collections.abc import Iterable, Sequence

from drawloom.ports import P2PChannel, Processes

Edge = tuple[int, int]


def connect_p2p_links(
    processes: Processes, name: str, disjoint_rank_lines: Sequence[Sequence[int]], edges: Iterable[Edge]
) -> dict[int, P2PChannel]:
    """
    Connect this rank to its peers, and return its channels by the peers' indices in its line.

    `disjoint_rank_lines` are rank sequences, and `edges` are index pairs with transfers, equal for all lines. All ranks
    in a line call this with the same edges; no other rank takes part.
    """
    line = next(line for line in disjoint_rank_lines if processes.rank in line)
    index = line.index(processes.rank)
    links: dict[int, P2PChannel] = {}
    for low, high in (edge for concurrent_edges in group_into_concurrent_rounds(edges) for edge in concurrent_edges):
        if index in (low, high):
            links[high if index == low else low] = processes.open_channel(f"{name} link", line[low], line[high])
    return dict(sorted(links.items()))


def group_into_concurrent_rounds(edges: Iterable[Edge]) -> list[list[Edge]]:
    """Return the edges, lower index first, in rounds where no index appears twice (greedy edge colouring)."""
    edges_by_round: list[list[Edge]] = []
    busy_by_round: list[set[int]] = []
    for edge in sorted({(min(edge), max(edge)) for edge in edges}):
        free_rounds = (number for number, busy in enumerate(busy_by_round) if not busy & set(edge))
        number = next(free_rounds, len(edges_by_round))
        if number == len(edges_by_round):
            edges_by_round.append([])
            busy_by_round.append(set())
        edges_by_round[number].append(edge)
        busy_by_round[number].update(edge)
    return edges_by_round
