"""The same endpoints written the usual way: FastAPI, pydantic, the ORM of SQLAlchemy, PyJWT for each request.

Written to do well: uvloop, httptools, asyncpg, prepared statements, an equally large pool, one commit for
both rows, no second query after it. Its access log is uvicorn's.
"""

import json
import os
import secrets
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar
from urllib.parse import unquote, urlsplit
from uuid import UUID, uuid4

import jwt
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Query, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer, SecurityScopes
from pydantic import BaseModel, ConfigDict, EmailStr, Field, StringConstraints, model_validator
from sqlalchemy import JSON, BigInteger, DateTime, ForeignKey, Identity, Index, LargeBinary, String, select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

ISSUER, AUDIENCE, TENANT = (os.environ[name] for name in ("AUTH_ISSUER", "AUTH_AUDIENCE", "TENANT"))
_jwks = json.loads(Path(unquote(urlsplit(os.environ["AUTH_JWKS_URL"]).path)).read_text())
KEYS = {key["kid"]: jwt.PyJWK(key).key for key in _jwks["keys"]}

DATABASE_URL = os.environ["DATABASE_URL"].replace("postgresql://", "postgresql+asyncpg://")
engine = create_async_engine(DATABASE_URL, pool_size=int(os.environ["POOL_SIZE"]), max_overflow=0)
sessions = async_sessionmaker(engine, expire_on_commit=False)


class Base(DeclarativeBase):
    """The tables."""


class Conveyancer(Base):
    __tablename__ = "conveyancer"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    charges_calculation_fee: Mapped[bool]


class CalculationRequest(Base):
    __tablename__ = "calculation_request"
    __table_args__ = (Index("newest", "conveyancer_id", "created_at", "id"),)

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    conveyancer_id: Mapped[str] = mapped_column(ForeignKey("conveyancer.id"))
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    updated_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    customer_email: Mapped[str]
    customer_phone: Mapped[str | None]
    customer_first_name: Mapped[str]
    customer_last_name: Mapped[str]
    sender_email: Mapped[str]
    sender_organization_name: Mapped[str]
    sender_first_name: Mapped[str]
    sender_last_name: Mapped[str]
    case_ref: Mapped[str]
    request_type: Mapped[str]
    property_value: Mapped[int | None] = mapped_column(BigInteger)
    notes: Mapped[str | None]
    external_id: Mapped[str | None]
    meta_data: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    calculation_fee_exempt: Mapped[bool]
    calculation_fee_exempt_reason: Mapped[str | None] = mapped_column(String(500))
    calculation_id: Mapped[str | None]
    secret: Mapped[str]

    @property
    def uuid(self) -> str:
        return f"req_{self.id.hex}"

    @property
    def request_url(self) -> str:
        return f"https://app.example.com/calculator/request/{self.uuid}?secret={self.secret}"


class OutboxEvent(Base):
    __tablename__ = "outbox"

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    request_id: Mapped[UUID]
    type: Mapped[str]
    payload: Mapped[bytes] = mapped_column(LargeBinary)
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))


Text255 = Annotated[str, StringConstraints(min_length=1, max_length=255, strip_whitespace=True)]


class RequestFields(BaseModel):
    customer_phone: Annotated[str, Field(max_length=32)] | None = None
    customer_first_name: Text255
    customer_last_name: Text255
    sender_organization_name: Text255
    sender_first_name: Text255
    sender_last_name: Text255
    case_ref: Text255
    request_type: Literal["SDLT_CALCULATION"] = "SDLT_CALCULATION"
    property_value: Annotated[int, Field(ge=0, le=10**12)] | None = None
    notes: Annotated[str, Field(max_length=10_000)] | None = None
    external_id: Annotated[str, Field(max_length=255)] | None = None
    meta_data: dict[str, Any] | None = None
    calculation_fee_exempt: bool = False
    calculation_fee_exempt_reason: Annotated[str, Field(max_length=500)] | None = None


class RequestIn(RequestFields):
    model_config = ConfigDict(extra="forbid", strict=True)

    customer_email: EmailStr
    sender_email: EmailStr

    @model_validator(mode="after")
    def has_reason(self) -> "RequestIn":
        if self.calculation_fee_exempt and not self.calculation_fee_exempt_reason:
            raise ValueError("calculation_fee_exempt_reason is required")
        return self


class RequestOut(RequestFields):
    """A request as returned. Its addresses are not validated again."""

    model_config = ConfigDict(from_attributes=True)

    uuid: str
    created_at: datetime
    updated_at: datetime
    customer_email: str
    sender_email: str
    calculation_id: str | None
    secret: str
    request_url: str


class Page(BaseModel):
    requests: list[RequestOut]
    next_cursor: str | None


class Option(BaseModel):
    value: str
    name: str


class Question(BaseModel):
    ref: str
    question: str
    info: str
    responseType: str  # noqa: N815 - the interface's name
    responseOptions: list[Option] | None = None  # noqa: N815
    conditions: dict[str, str] | None = None


class Questions(BaseModel):
    questionnaire: list[Question]


_written = tomllib.loads(Path("service/api/controllers/questionnaire.toml").read_text())
for _each in _written["questions"]:
    _each["responseOptions"] = _written["options"].get(_each.get("responseOptions"))
QUESTIONS = Questions.model_validate({"questionnaire": _written["questions"]})

Data = TypeVar("Data")


class Status(BaseModel):
    code: int = 200
    message: str = "OK"


class Meta(BaseModel):
    timestamp: datetime = Field(default_factory=lambda: datetime.now(UTC))


class Envelope(BaseModel, Generic[Data]):
    status: Status = Field(default_factory=Status)
    data: Data
    errors: None = None
    meta: Meta = Field(default_factory=Meta)


async def tenant_of_caller(
    required: SecurityScopes, credentials: Annotated[HTTPAuthorizationCredentials, Depends(HTTPBearer())]
) -> str:
    """Return the tenant of the access token, which must have the required scopes."""
    token = credentials.credentials
    try:
        key = KEYS[jwt.get_unverified_header(token)["kid"]]
        claims = jwt.decode(token, key, ["ES256"], audience=AUDIENCE, issuer=ISSUER, leeway=30)
    except (jwt.PyJWTError, KeyError):
        raise HTTPException(401) from None
    if not set(required.scopes) <= set(claims["scope"].split()):
        raise HTTPException(403)
    return claims["client_id"]


Writer = Annotated[str, Security(tenant_of_caller, scopes=["request:write"])]
Reader = Annotated[str, Security(tenant_of_caller, scopes=["request:read"])]


async def session() -> AsyncIterator[AsyncSession]:
    async with sessions() as opened:
        yield opened


Session = Annotated[AsyncSession, Depends(session)]


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with sessions() as opened:
        await opened.merge(Conveyancer(id=TENANT, name="Acme", charges_calculation_fee=True))
        await opened.commit()
    yield
    await engine.dispose()


app = FastAPI(lifespan=lifespan)


@app.get("/readyz")
async def readyz() -> str:
    return "ready"


@app.post("/v1/request")
async def create_request(body: RequestIn, tenant: Writer, session: Session) -> Envelope[RequestOut]:
    """Store a request and its event in one transaction. The tenant is checked by its foreign key."""
    now = datetime.now(UTC).replace(microsecond=0)
    own = {"id": uuid4(), "conveyancer_id": tenant, "created_at": now, "updated_at": now}
    row = CalculationRequest(**own, secret=secrets.token_urlsafe(32), **body.model_dump())
    session.add(row)
    session.add(OutboxEvent(request_id=row.id, type="request.created", payload=event_of(row), created_at=now))
    await session.commit()
    return Envelope(data=RequestOut.model_validate(row))


def event_of(row: CalculationRequest) -> bytes:
    fields = ("request_type", "property_value", "calculation_fee_exempt", "external_id")
    event = {
        "specversion": "1.0",
        "id": f"{row.uuid}.request.created.1",
        "source": "/calculation-requests",
        "type": "request.created",
        "subject": row.uuid,
        "time": row.created_at.isoformat(),
        "datacontenttype": "application/json",
        "data": {"uuid": row.uuid, "tenant": row.conveyancer_id, "sequence": 1}
        | {name: getattr(row, name) for name in fields},
    }
    return json.dumps(event).encode()


@app.get("/v1/request/{uuid_}")
async def retrieve_request(uuid_: str, tenant: Reader, session: Session) -> Envelope[RequestOut]:
    is_meant = CalculationRequest.id == UUID(uuid_.removeprefix("req_"))
    is_own = CalculationRequest.conveyancer_id == tenant
    row = await session.scalar(select(CalculationRequest).where(is_meant, is_own))
    if row is None:
        raise HTTPException(404)
    return Envelope(data=RequestOut.model_validate(row))


@app.get("/v1/request")
async def list_requests(
    tenant: Reader, session: Session, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> Envelope[Page]:
    statement = (
        select(CalculationRequest)
        .where(CalculationRequest.conveyancer_id == tenant)
        .order_by(CalculationRequest.created_at.desc(), CalculationRequest.id.desc())
        .limit(limit)
    )
    rows = [RequestOut.model_validate(row) for row in await session.scalars(statement)]
    return Envelope(data=Page(requests=rows, next_cursor=rows[-1].uuid if rows else None))


@app.get("/v1/questionnaire/structure")
async def questionnaire_structure(_: Reader) -> Envelope[Questions]:
    return Envelope(data=QUESTIONS)


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(os.environ["PORT"]), loop="uvloop", http="httptools")
