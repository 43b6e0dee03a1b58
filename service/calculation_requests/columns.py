"""The columns of calculation_request that make a row, written once: as the fields of its struct."""

from service.calculation_requests.model import CalculationRequest

# Rows become structs by position. Not `SELECT *`: a column that a migration adds would make the prepared
# statements of open transactions fail.
COLUMNS = CalculationRequest.__struct_fields__
_FIRMS_ALONE = frozenset({"notes", "external_id", "meta_data"})  # not for the customer


def with_columns(statement: str, *, values_after: int = 0) -> str:
    """Fill the columns into a statement, while its module is imported.

    `{columns}` lists them, `{request_columns}` lists them with the alias `request`, `{customer_columns}` has
    null for those that are the firm's alone, and `{values}` has a placeholder for each, numbered after the
    first *values_after*.
    """
    return statement.format(
        columns=", ".join(COLUMNS),
        request_columns=", ".join(f"request.{column}" for column in COLUMNS),
        customer_columns=", ".join(
            f"NULL AS {column}" if column in _FIRMS_ALONE else column for column in COLUMNS
        ),
        values=", ".join(f"${values_after + number}" for number in range(1, len(COLUMNS) + 1)),
    )
