"""Files of columns, as pyarrow writes them."""

import io

import pyarrow.parquet as pq
from pyarrow import ipc


def parquet(table, **how) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out, **{"row_group_size": 250, **how})
    return out.getvalue()


def arrow(table, new=ipc.new_stream, rows=250, **how) -> bytes:
    out = io.BytesIO()
    with new(out, table.schema, **how) as writer:
        writer.write_table(table, max_chunksize=rows)
    return out.getvalue()


def arrow_file(table, **how) -> bytes:
    return arrow(table, ipc.new_file, **how)


WRITERS = {".parquet": parquet, ".arrow": arrow, ".feather": arrow_file}
